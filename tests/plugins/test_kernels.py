"""The C++ kernels against the bodies that define the ops, in OpenVINO's real pipeline, on both instruction sets.

K and V are rotated, scaled and rounded by the same fp32 operations in the same order, so the cache is equal bit for
bit. Attention decodes the same fp32 numbers from it, whatever the cache's type; what differs is the order of sums
and e^x, so one fp32 bound, 1e-5 of the output's size, holds for every type.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import paged
import pytest
from paged import Arrays, Case

from trtforge.plugins.kv_dtypes import KV_DTYPES

HEADS = {"gqa": (6, 2), "mqa": (5, 1), "mha": (3, 3), "wide-gqa": (16, 2)}
BLOCKS = (8, 16, 32, 64, 128)
HEAD_SIZES = (32, 36, 64, 80, 96, 128, 256)


def matrix() -> Iterator[Case]:
    """Every KV dtype with every block size and every head size; all else cycles through its values."""
    heads, windows, caps = cycle(HEADS.values()), cycle((0, 7, 40, 64)), cycle((0.0, 0.0, 3.0))
    sizes, blocks, rotary = cycle(HEAD_SIZES), cycle(BLOCKS), cycle((None, 24, 16))
    pairs = [(kv, block, next(sizes)) for kv in KV_DTYPES for block in BLOCKS]
    pairs += [(kv, next(blocks), size) for kv in KV_DTYPES for size in HEAD_SIZES]
    for kv, block, size in dict.fromkeys(pairs):
        num_heads, num_kv_heads = next(heads)
        yield Case((), kv, num_heads, num_kv_heads, size, block, next(rotary), next(windows), next(caps))


def describe(case: Case) -> str:
    return (
        f"{case.kv_dtype}-b{case.tokens_per_block}-h{case.num_heads}/{case.num_kv_heads}x{case.head_size}"
        f"-r{case.rotary}-w{case.window}-c{case.softcap:g}"
    )


def ragged(rng: np.random.Generator, most: int = 150) -> tuple[tuple[int, int], ...]:
    """Some sequences: whole prompts, single tokens, and chunks in the middle."""
    lengths = [int(n) for n in rng.integers(1, most, 5)]
    queries = [lengths[0], 1, int(rng.integers(1, lengths[2] + 1)), 1, int(rng.integers(1, lengths[4] + 1))]
    return tuple(zip(lengths, queries, strict=True))


def assert_attention_equals_body(case: Case, inputs: Arrays) -> None:
    want = paged.run_body("PagedAttention", case, inputs)["attention"]
    got = paged.run_kernel("PagedAttention", case, inputs)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("case", list(matrix()), ids=describe)
def test_kernels_equal_the_bodies(case: Case, isa: str, rng: np.random.Generator) -> None:
    case = replace(case, sequences=ragged(rng))
    inputs = paged.make_inputs(case, rng)
    assert_attention_equals_body(case, inputs)

    want = paged.run_body("KVCacheUpdate", case, inputs)
    np.testing.assert_array_equal(paged.run_kernel("KVCacheUpdate", case, inputs), want["q_rotated"])
    np.testing.assert_array_equal(inputs["kv_pool"], want["kv_pool_out"])
    if "kv_scales" in inputs:
        np.testing.assert_array_equal(inputs["kv_scales"], want["kv_scales_out"])


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("kv_dtype", ["fp32", "fp8"])
def test_long_sequences(kv_dtype: str, window: int, isa: str, rng: np.random.Generator) -> None:
    """Past the positions where the kernel splits a sequence."""
    case = Case(((1500, 3), (1024, 1), (1025, 2), (512, 1), (600, 1)), kv_dtype, 4, 2, 32, window=window)
    assert_attention_equals_body(case, paged.make_inputs(case, rng))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_extreme_scores(kv_dtype: str, isa: str, rng: np.random.Generator) -> None:
    """Queries so large that all weight lies on one key, and queries of zeros, for which all keys weigh the same."""
    case = Case(((70, 2), (40, 1)), kv_dtype, 2, 1, 64)
    inputs = paged.make_inputs(case, rng)
    inputs["q"][0] *= 1e4
    inputs["q"][1] = 0
    inputs["q"][2] *= -1e4
    assert_attention_equals_body(case, inputs)


def test_body_equals_plain_attention(rng: np.random.Generator) -> None:
    """The body itself, against attention written out in float64 for one head of one sequence at a time."""
    case = Case(((37, 5), (1, 1), (16, 16)), "fp32", 6, 2, 16, 8, window=9, softcap=4.0)
    inputs = paged.make_inputs(case, rng)
    got = paged.run_body("PagedAttention", case, inputs)["attention"].reshape(-1, 6, 16)
    pool = (
        inputs["kv_pool"].view(np.float32)[:, paged.LAYER].astype(np.float64)
    )  # [blocks, 2, kv_heads, 8, 16]
    for b, (length, queries) in enumerate(case.sequences):
        blocks = inputs["block_tables"][b, : -(-length // 8)]
        k, v = (np.concatenate(list(pool[blocks, i]), axis=1)[:, :length] for i in (0, 1))
        for row in range(queries):
            t, p = int(inputs["query_start"][b]) + row, length - queries + row
            seen = slice(max(0, p - 8), p + 1)
            for head in range(6):
                q = inputs["q"][t].reshape(6, 16)[head].astype(np.float64)
                scores = 4.0 * np.tanh(k[head // 3, seen] @ q * 16**-0.5 / 4.0)
                weights = np.exp(scores - scores.max())
                want = weights @ v[head // 3, seen] / weights.sum()
                np.testing.assert_allclose(got[t, head], want, atol=2e-6)


def test_body_rotates_as_defined(rng: np.random.Generator) -> None:
    """Pairs (i, i + R/2) of the first R elements turn by their angle; K goes to the pool turned, V as it is."""
    case = Case(((9, 9),), "fp32", 2, 1, 16, rotary=12)
    inputs = paged.make_inputs(case, rng)
    out = paged.run_body("KVCacheUpdate", case, inputs)

    def turned(x: Any) -> Any:
        cos, sin = np.split(inputs["cos_sin"].astype(np.float64)[:, None], 2, axis=-1)
        z = (x[..., :6] + 1j * x[..., 6:12]) * (cos + 1j * sin)
        return np.concatenate([z.real, z.imag, x[..., 12:]], axis=-1)

    np.testing.assert_allclose(
        out["q_rotated"].reshape(9, 2, 16), turned(inputs["q"].reshape(9, 2, 16)), atol=1e-6
    )
    blocks, offsets = inputs["slot_mapping"] // 16, inputs["slot_mapping"] % 16
    stored = out["kv_pool_out"].view(np.float32)[blocks, paged.LAYER, :, 0, offsets]  # [T, 2, 16]
    np.testing.assert_allclose(stored[:, 0], turned(inputs["k"].reshape(9, 1, 16))[:, 0], atol=1e-6)
    np.testing.assert_array_equal(stored[:, 1], inputs["v"])
