"""What a cache element is: bodies and kernels against independent types, and what rounding may cost."""

import ml_dtypes
import numpy as np
import paged
import pytest
from numpy.typing import NDArray
from paged import Case

from trtforge.plugins.kv_codec import e4m3_value
from trtforge.plugins.kv_dtypes import KV_DTYPES


def store(
    case: Case, k: NDArray[np.float32], rng: np.random.Generator, *, body: bool
) -> tuple[NDArray, NDArray]:
    """(bytes, scales) of rows `k` [T, head_size] that went through KVCacheUpdate unrotated, as V."""
    inputs = paged.make_inputs(case, rng)
    inputs["v"] = np.ascontiguousarray(k)
    if body:
        out = paged.run_body("KVCacheUpdate", case, inputs)
        pool, scales = out["kv_pool_out"], out.get("kv_scales_out")
    else:
        paged.run_kernel("KVCacheUpdate", case, inputs)
        pool, scales = inputs["kv_pool"], inputs.get("kv_scales")
    at = (inputs["slot_mapping"] // 16, paged.LAYER, 1, 0, inputs["slot_mapping"] % 16)
    return pool[at], np.ones((len(k), 1), np.float32) if scales is None else scales[at]


def decode(kv_dtype: str, stored: NDArray, scales: NDArray) -> NDArray[np.float64]:
    views = {
        "fp32": np.float32,
        "fp16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "int8": np.int8,
        "fp8": ml_dtypes.float8_e4m3fn,
    }
    return stored.view(views[kv_dtype]).astype(np.float64) * scales


#: Half a unit in the last place, relative to a value, and absolute in units of a row's scale.
ROUNDING = {
    "fp32": (0, 0),
    "fp16": (2**-11, 2**-25),
    "bf16": (2**-8, 0),
    "int8": (0, 0.5),
    "fp8": (2**-4, 2**-10),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("body", [True, False], ids=["body", "kernel"])
def test_rounding_costs_half_a_unit(kv_dtype: str, body: bool, rng: np.random.Generator) -> None:
    values = (rng.standard_normal((40, 64)) * 10.0 ** rng.integers(-6, 3, (40, 1))).astype(np.float32)
    values[3] = 0
    stored, scales = store(Case(((40, 40),), kv_dtype, 2, 1, 64), values, rng, body=body)
    relative, absolute = ROUNDING[kv_dtype]
    error = np.abs(decode(kv_dtype, stored, scales) - values)
    assert (error <= (relative * np.abs(values) + absolute * scales) * (1 + 1e-6)).all()
    assert (stored[3] == 0).all()


@pytest.mark.parametrize("body", [True, False], ids=["body", "kernel"])
def test_fp8_codes_are_e4m3fn(body: bool, isa: str, rng: np.random.Generator) -> None:
    """All values, all midpoints between neighbours (ties) and their neighbours in fp32. One 448 per row makes the
    scale 1, so that the codes are those of the values themselves."""
    grid = np.array([e4m3_value(c) for c in range(0x7F)], np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    both = np.concatenate(
        [grid, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(999))]
    )
    values = np.concatenate([both, -both])
    values = values[values != 0]  # the sign of zero is not kept
    rows = np.full((-(-len(values) // 63), 64), 448, np.float32)
    rows[:, 1:] = np.resize(values, (len(rows), 63))
    stored, scales = store(Case(((len(rows), len(rows)),), "fp8", 2, 1, 64), rows, rng, body=body)
    assert (scales == 1).all()
    np.testing.assert_array_equal(stored, rows.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("body", [True, False], ids=["body", "kernel"])
@pytest.mark.parametrize(("kv_dtype", "type_"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bit_types_round_to_even(
    kv_dtype: str, type_: type, body: bool, isa: str, rng: np.random.Generator
) -> None:
    """Numbers, subnormals of fp16, ties, and magnitudes beyond fp16, which saturate there."""
    codes = rng.integers(0, 0x7BFF, (30, 64)).astype(np.uint16)
    codes[:8] %= 0x400
    grid = codes.view(type_).astype(np.float32)
    above = (codes + 1).view(type_).astype(np.float32)
    rows = np.concatenate([grid, -grid, (grid + above) / 2, np.nextafter((grid + above) / 2, np.float32(0))])
    rows[5] = 1e6
    if kv_dtype == "bf16":  # keep clear of fp32's own subnormals
        rows = np.where(np.abs(rows) < 1e-37, np.float32(0), rows)
    stored, _ = store(Case(((len(rows), len(rows)),), kv_dtype, 2, 1, 64), rows, rng, body=body)
    want = np.clip(rows, -65504, 65504) if kv_dtype == "fp16" else rows
    np.testing.assert_array_equal(stored, want.astype(type_).view(np.uint8))


@pytest.mark.parametrize("body", [True, False], ids=["body", "kernel"])
def test_every_code_decodes_to_its_value(body: bool, isa: str, rng: np.random.Generator) -> None:
    """A sequence of one key has its value as its attention."""
    case = Case(((1, 1),), "fp8", 2, 1, 256)
    inputs = paged.make_inputs(case, rng)
    block = inputs["block_tables"][0, 0]
    codes = np.arange(256, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    inputs["kv_pool"][block, paged.LAYER, 1, 0, 0] = codes
    inputs["kv_scales"][block, paged.LAYER, 1, 0, 0] = 0.375
    run = (
        (lambda: paged.run_body("PagedAttention", case, inputs)["attention"])
        if body
        else (lambda: paged.run_kernel("PagedAttention", case, inputs))
    )
    np.testing.assert_array_equal(
        run()[0, :256], codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * 0.375
    )
