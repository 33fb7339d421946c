"""The extension in OpenVINO: it writes the caller's memory, only there, and refuses what does not fit."""

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import paged
import pytest
from paged import Arrays, Case

from trtforge.plugins import OPS, cpu
from trtforge.plugins.errors import EnvironmentProblem
from trtforge.plugins.kv_dtypes import KV_DTYPES

MAP_NORESERVE = 0x4000  # Linux's; mmap has no name for it

CASE = Case(((37, 5), (1, 1), (16, 16)), "int8", 4, 2, 32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_only_the_tokens_slots_are_written(kv_dtype: str, isa: str, rng: np.random.Generator) -> None:
    """In the caller's own arrays, K and V of one layer, every head; nothing else of them changes."""
    case = replace(CASE, kv_dtype=kv_dtype)
    inputs = paged.make_inputs(case, rng)
    names = [n for n in ("kv_pool", "kv_scales") if n in inputs]
    before = {n: inputs[n].copy() for n in names}
    paged.run_kernel("KVCacheUpdate", case, inputs)
    blocks, offsets = inputs["slot_mapping"] // 16, inputs["slot_mapping"] % 16
    for name in names:
        changed = (inputs[name] != before[name]) & ~(np.isnan(inputs[name]) & np.isnan(before[name]))
        changed_rows = changed.any(axis=-1)
        expected = np.zeros_like(changed_rows)
        expected[blocks, paged.LAYER, :, :, offsets] = True
        assert changed_rows[expected].mean() > 0.9  # a row may be what it was by chance
        assert not changed_rows[~expected].any()


def test_no_pool_is_copied_or_converted() -> None:
    """The compiled graph has one output and no operation on a pool but our own."""
    for name in paged.PAGED_OPS:
        compiled = paged.compiled(name, replace(CASE, sequences=())).get_compiled_model()
        assert len(compiled.outputs) == 1
        ops = compiled.get_runtime_model().get_ordered_ops()
        pools = [op for op in ops if op.get_friendly_name() in ("kv_pool", "kv_scales")]
        readers = [r.get_node().get_friendly_name() for p in pools for r in p.output(0).get_target_inputs()]
        assert len(pools) == 2 and readers == [OPS[name].outputs[0].name] * 2


@pytest.mark.parametrize(
    ("op", "port", "index", "value", "message"),
    [
        ("KVCacheUpdate", "slot_mapping", 3, -1, "slot outside the pool"),
        ("KVCacheUpdate", "slot_mapping", 0, "end", "slot outside the pool"),
        ("PagedAttention", "block_tables", (0, 1), -1, "block outside the pool"),
        ("PagedAttention", "block_tables", (2, 0), 99, "block outside the pool"),
        ("PagedAttention", "positions", 5, 1, "outside its sequence's kv_length"),
        ("PagedAttention", "positions", 0, -1, "outside its sequence's kv_length"),
        ("PagedAttention", "kv_lengths", 0, 999, "block table cannot hold"),
        ("PagedAttention", "query_start", 1, 20, "must not decrease"),
        ("PagedAttention", "query_start", 3, 5, "end with the number of tokens"),
    ],
)
def test_bad_indices_are_refused(
    op: str, port: str, index: Any, value: Any, message: str, rng: np.random.Generator
) -> None:
    inputs = paged.make_inputs(CASE, rng)
    slots = inputs["kv_pool"].shape[0] * CASE.tokens_per_block
    inputs[port][index] = slots if value == "end" else value
    before = inputs["kv_pool"].copy()
    with pytest.raises(RuntimeError, match=message):
        paged.run_kernel(op, CASE, inputs)
    np.testing.assert_array_equal(inputs["kv_pool"], before)


def test_unused_table_entries_may_hold_anything(rng: np.random.Generator) -> None:
    """Past a sequence's end, and before its window: the runtime frees those blocks."""
    case = replace(CASE, sequences=((60, 2),), window=10)
    inputs = paged.make_inputs(case, rng)
    want = paged.run_kernel("PagedAttention", case, inputs)
    inputs["block_tables"][0, [0, 1, 2, 4]] = [-7, 1 << 30, -1, 1 << 20]  # positions 49..59 lie in block 3
    np.testing.assert_array_equal(paged.run_kernel("PagedAttention", case, inputs), want)


@pytest.mark.parametrize(
    ("op", "attribute", "value", "message"),
    [
        ("KVCacheUpdate", "head_size", 24, "q has shape"),
        ("KVCacheUpdate", "kv_dtype", "fp16", "kv_pool has shape"),
        ("KVCacheUpdate", "kv_dtype", "int8", "has 6 inputs, want 7"),
        ("KVCacheUpdate", "kv_dtype", "fp4", "unknown KV cache dtype 'fp4'"),
        ("KVCacheUpdate", "num_heads", 3, "does not divide num_heads=3"),
        ("PagedAttention", "num_heads", 8, "q has shape"),
        ("PagedAttention", "window", -1, "window=-1"),
        ("PagedAttention", "layer", -1, "layer=-1"),
    ],
)
def test_graphs_that_do_not_fit_are_refused(
    op: str, attribute: str, value: Any, message: str, rng: np.random.Generator
) -> None:
    case = replace(CASE, kv_dtype="fp32")
    shapes = {name: array.shape for name, array in paged.make_inputs(case, rng).items()}
    model = paged.lowered_model(op, case, shapes)
    paged.core().read_model(model.SerializeToString())
    (found,) = [a for a in model.graph.node[0].attribute if a.name == attribute]
    found.CopyFrom(onnx.helper.make_attribute(attribute, value))
    with pytest.raises(RuntimeError, match=message):
        paged.core().read_model(model.SerializeToString())


def test_pools_past_two_to_the_31_bytes(rng: np.random.Generator) -> None:
    """The last block of a pool of 4.5 GB, of which only the pages touched exist."""
    case = Case(((20, 20),), "fp32", 2, 1, 64)
    inputs = paged.make_inputs(case, rng)
    num_blocks = 184_000
    shape = (num_blocks, *inputs["kv_pool"].shape[1:])
    memory = mmap.mmap(-1, int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    assert len(memory) > 1 << 32
    large = np.frombuffer(memory, np.uint8).reshape(shape)

    def moved(arrays: Arrays) -> Arrays:
        """The same step with its two blocks at the end of the large pool."""
        table = np.zeros_like(arrays["block_tables"])
        table[0, :2] = [num_blocks - 1, num_blocks - 2]
        slots = table[0][np.arange(20) // 16].astype(np.int64) * 16 + np.arange(20) % 16
        return arrays | {"kv_pool": large, "block_tables": table, "slot_mapping": slots}

    far = moved(inputs)
    for op in ("KVCacheUpdate", "PagedAttention"):
        np.testing.assert_array_equal(paged.run_kernel(op, case, far), paged.run_kernel(op, case, inputs))
    near = inputs["kv_pool"][inputs["block_tables"][0, 0], paged.LAYER]
    assert near.any()
    np.testing.assert_array_equal(large[num_blocks - 1, paged.LAYER], near)


def test_a_missing_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(EnvironmentProblem, match=r"not compiled; install a C\+\+17 compiler"):
        cpu.library_path()


def test_a_library_that_does_not_load_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import openvino

    (tmp_path / cpu.LIBRARY_NAME).write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(EnvironmentProblem, match="does not load") as raised:
        cpu.register(openvino.Core())
    assert "\n" not in str(raised.value)
