"""A row's result depends on its own q and the keys that it sees: not on the step's other rows, bit for bit."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import paged
import pytest
from paged import Arrays, Case

from trtforge.plugins.kv_dtypes import KV_DTYPES

SEQUENCES = ((45, 9), (1, 1), (33, 33), (90, 1), (61, 4))


def step(inputs: Arrays, rows: list[tuple[int, int, int]]) -> Arrays:
    """A step over some of the sequences' rows: (sequence, first row, end row), in this order. The cache is as it was,
    with later tokens in it too, but kv_lengths ends with the last row."""
    starts = inputs["query_start"]
    at = np.concatenate([np.arange(starts[b] + first, starts[b] + end) for b, first, end in rows])
    part = {
        k: v[at] if k in ("q", "k", "v", "cos_sin", "slot_mapping", "positions") else v
        for k, v in inputs.items()
    }
    sequences = [b for b, _, _ in rows]
    part["query_start"] = np.cumsum([0, *(end - first for _, first, end in rows)], dtype=np.int32)
    part["kv_lengths"] = np.array(
        [inputs["positions"][starts[b] + end - 1] + 1 for b, _, end in rows], np.int32
    )
    part["block_tables"] = np.ascontiguousarray(inputs["block_tables"][sequences])
    return part


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_alone_equals_the_row_in_a_batch(
    kv_dtype: str, window: int, isa: str, rng: np.random.Generator
) -> None:
    case = Case(SEQUENCES, kv_dtype, 6, 2, 64, window=window, softcap=8.0 if window else 0.0)
    inputs = paged.make_inputs(case, rng)
    together = paged.run_kernel("PagedAttention", case, inputs)
    for b, (_, queries) in enumerate(SEQUENCES):
        first = int(inputs["query_start"][b])
        for row in range(queries):
            alone = paged.run_kernel("PagedAttention", case, step(inputs, [(b, row, row + 1)]))
            np.testing.assert_array_equal(alone[0].view(np.uint32), together[first + row].view(np.uint32))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_verified_drafts_equal_single_tokens(kv_dtype: str, isa: str, rng: np.random.Generator) -> None:
    """Two to eight rows of a sequence in one step, as a speculated draft is checked."""
    case = Case(((75, 8),), kv_dtype, 8, 1, 80, 32)
    inputs = paged.make_inputs(case, rng)
    singles = [paged.run_kernel("PagedAttention", case, step(inputs, [(0, r, r + 1)]))[0] for r in range(8)]
    for rows in range(2, 9):
        several = paged.run_kernel("PagedAttention", case, step(inputs, [(0, 0, rows)]))
        np.testing.assert_array_equal(several, np.stack(singles[:rows]))


@pytest.mark.parametrize("window", [0, 600])
def test_long_rows_do_not_depend_on_the_split(window: int, isa: str, rng: np.random.Generator) -> None:
    """With few rows the parts of a long sequence are spread over threads, with many a thread folds them as it goes."""
    case = Case(((1300, 80), (700, 1), (1030, 40)), "int8", 16, 8, 64, window=window)
    inputs = paged.make_inputs(case, rng)
    together = paged.run_kernel("PagedAttention", case, inputs)
    for b, row in [(0, 0), (0, 13), (0, 31), (0, 44), (0, 63), (0, 79), (1, 0), (2, 15), (2, 39)]:
        alone = paged.run_kernel("PagedAttention", case, step(inputs, [(b, row, row + 1)]))
        np.testing.assert_array_equal(alone[0], together[inputs["query_start"][b] + row])


def test_neither_order_nor_threads_matter(rng: np.random.Generator) -> None:
    case = Case(SEQUENCES, "fp16", 6, 2, 64)
    inputs = paged.make_inputs(case, rng)
    together = paged.run_kernel("PagedAttention", case, inputs)
    np.testing.assert_array_equal(paged.run_kernel("PagedAttention", case, inputs, threads=1), together)
    order = [3, 0, 4, 2, 1]
    shuffled = paged.run_kernel(
        "PagedAttention", case, step(inputs, [(b, 0, SEQUENCES[b][1]) for b in order])
    )
    starts = inputs["query_start"]
    np.testing.assert_array_equal(
        shuffled, np.concatenate([together[starts[b] : starts[b + 1]] for b in order])
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(
    kv_dtype: str, isa: str, rng: np.random.Generator
) -> None:
    """Both ops over a prompt of 70 tokens: the same cache and the same attention, however it is cut."""
    case = Case(((70, 70), (40, 40)), kv_dtype, 4, 2, 64)
    inputs = paged.make_inputs(case, rng)

    def run(cuts: list[int]) -> tuple[Arrays, np.ndarray]:
        state = {k: v.copy() for k, v in inputs.items()}
        rows: list[np.ndarray] = []
        for first, end in zip([0, *cuts], [*cuts, 70], strict=True):
            part = step(state, [(0, first, end)])
            part["q"] = paged.run_kernel("KVCacheUpdate", case, part)
            rows.append(paged.run_kernel("PagedAttention", replace(case, sequences=()), part))
        return state, np.concatenate(rows)

    whole_state, whole = run([])
    for cuts in ([1], [20, 40], [16, 17, 18, 64]):
        state, rows = run(cuts)
        np.testing.assert_array_equal(rows, whole)
        np.testing.assert_array_equal(state["kv_pool"], whole_state["kv_pool"])


def chunked(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """A prompt's rows in chunks of random sizes, some of one row."""
    cuts = sorted({0, length, *rng.integers(0, length, 3).tolist(), length - 1})
    return list(pairwise(cuts))


@pytest.mark.parametrize(
    ("kv_dtype", "heads"), [("fp32", (16, 2)), ("int8", (9, 3)), ("fp16", (3, 3)), ("fp8", (5, 1))]
)
def test_random_batches_and_chunkings(
    kv_dtype: str, heads: tuple[int, int], isa: str, rng: np.random.Generator
) -> None:
    """Prompts that cross the positions where a sequence is split, cut into chunks that run in steps of random
    company: each row as in the one step that has them all."""
    lengths = (300, 35, 257)
    case = Case(tuple((n, n) for n in lengths), kv_dtype, *heads, 64)
    inputs = paged.make_inputs(case, rng)
    together = paged.run_kernel("PagedAttention", case, inputs)
    starts = inputs["query_start"]
    open_chunks = [(b, *chunk) for b, n in enumerate(lengths) for chunk in chunked(n, rng)]
    while open_chunks:
        count = int(rng.integers(1, 6))
        rng.shuffle(open_chunks)
        company, open_chunks = open_chunks[:count], open_chunks[count:]
        got = paged.run_kernel("PagedAttention", case, step(inputs, company))
        want = np.concatenate([together[starts[b] + first : starts[b] + end] for b, first, end in company])
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize(("kv_dtype", "tokens_per_block"), [("fp32", 16), ("int8", 48), ("bf16", 16)])
def test_shared_prefixes_change_nothing(
    kv_dtype: str, tokens_per_block: int, isa: str, rng: np.random.Generator
) -> None:
    """Requests whose tables begin with the same blocks are read together: each as it is alone."""
    lengths = (700, 900, 530, 256, 512, 40, 1030, 801)
    case = Case(tuple((n, 1) for n in lengths), kv_dtype, 9, 3, 64, tokens_per_block)
    inputs = paged.make_inputs(case, rng)
    tables = inputs["block_tables"]
    for b, tokens in ((1, 690), (2, 512), (3, 256), (4, 300), (5, 30), (6, 270), (7, 0)):
        blocks = tokens // tokens_per_block
        tables[b, :blocks] = tables[0, :blocks]
    together = paged.run_kernel("PagedAttention", case, inputs)
    for b in range(len(lengths)):
        alone = paged.run_kernel("PagedAttention", case, step(inputs, [(b, 0, 1)]))
        np.testing.assert_array_equal(alone[0].view(np.uint32), together[b].view(np.uint32))
