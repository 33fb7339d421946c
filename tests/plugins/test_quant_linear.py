"""QuantLinear: the C++ kernel against the body that defines it, on every instruction set that this CPU has.

Activations are rounded by the same fp32 operations, so both multiply the same numbers; what differs is the order of
sums, and a bound of fp32 rounding holds for every type.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import linears
import numpy as np
import onnx
import pytest
from linears import Case, Kernel, Weights

from trtforge.plugins import OPS, cpu
from trtforge.plugins.cpu.ops import CPU_OPS
from trtforge.plugins.cpu.packing import pack
from trtforge.plugins.errors import InvalidArgument

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 17)
KINDS = [
    Case(code_type=code_type, has_minimums="U" in code_type, activation_bits=bits)
    for code_type in ("UINT4", "INT4", "UINT8", "INT8")
    for bits in (8, 32)
]


def matrix() -> Iterator[Case]:
    """Every code type with every group size and both kinds of activations; all else cycles through its values."""
    scales, minimums, bias = cycle(("FLOAT16", "FLOAT")), cycle((True, False, True)), cycle((True, False))
    shapes = cycle(((48, 384), (40, 768), (7, 384)))
    for code_type in ("UINT4", "INT4", "UINT8", "INT8"):
        for group_size in (32, 64, 128, 0):
            for bits in (8, 32):
                yield Case(
                    next(shapes), code_type, group_size, next(scales), next(minimums), next(bias), bits
                )


def activations(case: Case, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Groups of very different size."""
    x = rng.standard_normal((rows, case.shape[1]), np.float32)
    sizes = 10.0 ** rng.integers(-3, 3, (rows, case.shape[1] // 32)).astype(np.float32)
    return x * sizes.repeat(32, 1)


def check_close(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    """Within fp32 rounding of sums whose terms have the absolute sum `bound`."""
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 2e-6 * bound + 1e-30).all(), np.max(np.abs(got - want) / bound)


@pytest.mark.parametrize("case", list(matrix()), ids=str)
def test_kernel_equals_body(case: Case, isa: str, rng: np.random.Generator) -> None:
    weights = linears.make_weights(case, rng)
    kernel, values = Kernel(case, weights), weights.values
    for rows in ROWS:
        x = activations(case, rows, rng)
        used = linears.round_activations(x) if case.activation_bits == 8 else x
        bound = np.abs(used).astype(np.float64) @ np.abs(values).T + np.abs(weights.bias)
        got = kernel(x)
        check_close(got, used.astype(np.float64) @ values.T + weights.bias, bound)
        check_close(got, linears.run_body(case, weights, x), bound)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_a_row_does_not_depend_on_the_others(case: Case, isa: str, rng: np.random.Generator) -> None:
    """Bit for bit: alone, in any number of rows, on any number of threads. 300 rows are more than one cache chunk."""
    case = replace(case, shape=(80, 1536), has_bias=True)
    weights = linears.make_weights(case, rng)
    kernel, single = Kernel(case, weights), Kernel(case, weights, threads=1)
    x = activations(case, 300, rng)
    together = kernel(x)
    np.testing.assert_array_equal(single(x), together)
    for rows in range(1, 20):
        first = int(rng.integers(0, len(x) - rows))
        np.testing.assert_array_equal(kernel(x[first : first + rows]), together[first : first + rows])


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_instruction_sets_agree(case: Case, rng: np.random.Generator) -> None:
    """Bit for bit where there are fused multiply-adds; the generic set rounds twice."""
    library = ctypes.CDLL(str(cpu.library_path()))
    kernel = Kernel(case, linears.make_weights(case, rng))
    x = activations(case, 9, rng)
    results = {}
    try:
        for isa in ("generic", "avx2", "avx512"):
            if library.trtforge_cpu_force_isa(isa.encode()):
                results[isa] = kernel(x)
    finally:
        library.trtforge_cpu_force_isa(b"")
    if "avx512" in results:
        np.testing.assert_array_equal(results["avx512"], results["avx2"])
    bound = 1e-5 * np.abs(results["generic"]).max(axis=1, keepdims=True)
    for result in results.values():
        assert (np.abs(result - results["generic"]) <= bound).all()


@pytest.mark.parametrize("case", [k for k in KINDS if k.activation_bits == 8], ids=str)
def test_the_largest_products_do_not_saturate(case: Case, isa: str) -> None:
    """Codes and activations at their ends, in runs and alternating: exact, as all sums are small integers."""
    low, high = linears.CODES[case.code_type]
    ends = np.array([[high - 1, high - 1], [low, low], [high - 1, low], [low, high - 1]])
    codes = np.tile(ends, (1, 32)).astype(np.int8 if low else np.uint8)
    ones = np.ones((4, 2), np.float16)
    case = replace(case, shape=(4, 64), has_minimums=False)
    x = np.tile(np.array([[127, 127], [-127, -127], [127, -127], [-127, 127]], np.float32), (1, 32))
    kernel = Kernel(case, Weights(codes, ones, None, np.zeros(1, np.float32)))
    want = x.astype(np.int64) @ codes.astype(np.int64).T
    np.testing.assert_array_equal(kernel(x), want)
    np.testing.assert_array_equal(kernel(x[:1]), want[:1])


@pytest.mark.parametrize("bits", [8, 32])
def test_activations_of_every_size(bits: int, isa: str, rng: np.random.Generator) -> None:
    """Zeros, subnormal and huge numbers: as the body has it. What is no number shows in its row, and in no other."""
    case = Case(activation_bits=bits)
    weights = linears.make_weights(case, rng)
    kernel = Kernel(case, weights)
    x = activations(case, 6, rng)
    x[0] = 0
    x[1, :32] *= 1e-38
    x[2, 32:64] = 1e-31  # below the smallest unit
    x[3] *= 1e30
    want = linears.run_body(case, weights, x)
    got = kernel(x)
    assert not got[0].any()
    assert (np.abs(got - want) <= 1e-5 * np.abs(want).max(axis=1, keepdims=True)).all()
    clean = got.copy()
    x[4, 40] = np.nan
    x[5, 3] = np.inf
    got = kernel(x)
    assert not np.isfinite(got[4:]).any()
    np.testing.assert_array_equal(got[:4], clean[:4])


def test_no_rows(isa: str, rng: np.random.Generator) -> None:
    case = Case()
    assert Kernel(case, linears.make_weights(case, rng))(np.empty((0, 192), np.float32)).shape == (0, 48)


def test_the_layout_is_as_described(rng: np.random.Generator) -> None:
    """Single codes, scales and minimums, found where packing.py says that they lie."""
    case = Case((40, 256), "INT4", 64)
    weights = linears.make_weights(case, rng)
    packed = pack(case.layout, weights.codes, weights.scales, weights.minimums)
    group_bytes = 2 * 256 + 2 * 32
    assert packed.shape == (3, 4 * group_bytes)
    for row, column in [(0, 0), (5, 19), (17, 64), (39, 255), (31, 111)]:
        group = packed[row // 16, column // 64 * group_bytes :][:group_bytes]
        chunk, j = column % 32 // 4, column % 4
        byte = int(group[column % 64 // 32 * 256 + 64 * (chunk % 4) + 4 * (row % 16) + j])
        assert (byte >> 4 if chunk >= 4 else byte & 15) == weights.codes[row, column] + 8
        numbers = group[512:].view(np.float16).reshape(2, 16)
        assert weights.minimums is not None
        assert numbers[0, row % 16] == weights.scales[row, column // 64]
        assert numbers[1, row % 16] == weights.minimums[row, column // 64]


def test_weights_are_read_where_they_lie(tmp_path: Path, rng: np.random.Generator) -> None:
    """The engine's file stays mapped: no copy of the weights is made, at load nor at run."""
    import openvino

    case = Case((16384, 4096), "INT8", 0, has_minimums=False)
    codes = rng.integers(-128, 128, case.shape, np.int8)
    weights = Weights(codes, np.ones((16384, 1), np.float16), None, np.zeros(1, np.float32))
    graph = linears.core().read_model(linears.packed_model(case, weights).SerializeToString())
    openvino.save_model(graph, tmp_path / "model.xml", compress_to_fp16=False)
    size = (tmp_path / "model.bin").stat().st_size
    del graph

    def own_bytes() -> int:
        """Memory of this process that no file is behind."""
        text = Path("/proc/self/smaps_rollup").read_text()
        found = re.search(r"^Anonymous: +(\d+) kB", text, re.MULTILINE)
        assert found
        return int(found[1]) << 10

    before = own_bytes()
    compiled = linears.core().compile_model(
        tmp_path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    compiled(np.ones((1, 4096), np.float32))
    assert own_bytes() - before < size / 4


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("bits", 2, "bits=2"),
        ("scale_bits", 8, "scale_bits=8"),
        ("activation_bits", 16, "activation_bits=16"),
        ("group_size", 48, "group_size=48"),
        ("group_size", 128, "group_size=128"),
        ("in_features", 384, "x has shape"),
        ("out_features", 64, "weights has shape"),
        ("has_minimums", 0, "weights has shape"),
    ],
)
def test_graphs_that_do_not_fit_are_refused(
    attribute: str, value: int, message: str, rng: np.random.Generator
) -> None:
    case = Case()
    model = linears.packed_model(case, linears.make_weights(case, rng))
    linears.core().read_model(model.SerializeToString())
    (found,) = [a for a in model.graph.node[0].attribute if a.name == attribute]
    found.CopyFrom(onnx.helper.make_attribute(attribute, value))
    if attribute in ("bits", "scale_bits", "activation_bits"):
        with pytest.raises(InvalidArgument, match=f"{attribute}={value}"):
            CPU_OPS["PackedLinear"].complete(case.layout.attributes(8) | {attribute: value})
    with pytest.raises(RuntimeError, match=message):
        linears.core().read_model(model.SerializeToString())


def test_onnx_accepts_the_body(rng: np.random.Generator) -> None:
    case = Case()
    model = linears.body_model(case, linears.make_weights(case, rng))
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    assert list(function.input) == [p.name for p in OPS["QuantLinear"].inputs]
    assert list(function.attribute) == [a.name for a in OPS["QuantLinear"].attributes]


def test_the_cpp_op_has_the_declared_attributes(rng: np.random.Generator) -> None:
    case = Case()
    model = linears.core().read_model(
        linears.packed_model(case, linears.make_weights(case, rng)).SerializeToString()
    )
    node = next(n for n in model.get_ops() if n.get_type_name() == "PackedLinear")
    want: dict[str, Any] = CPU_OPS["PackedLinear"].complete(case.layout.attributes(8))
    assert node.get_attributes() == want
