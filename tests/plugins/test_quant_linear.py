"""QuantLinear: the C++ kernel against the body that defines it, on every instruction set that this CPU has.

Activations are rounded by the same fp32 operations, so both multiply the same numbers; what differs is the order of
sums, and a bound of fp32 rounding holds for every type.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import linears
import numpy as np
import pytest
from linears import Case, Kernel

from trtforge.plugins.cpu.packing import pack

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 17)


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


def close(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    """Within fp32 rounding of sums whose terms have the absolute sum `bound`."""
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 2e-6 * bound + 1e-30).all(), np.max(np.abs(got - want) / bound)


def activations(case: Case, rows: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((rows, case.shape[1]), np.float32)
    return x * 10.0 ** rng.integers(-3, 3, (rows, case.shape[1] // 32)).astype(np.float32).repeat(32, 1)


@pytest.mark.parametrize("case", list(matrix()), ids=str)
def test_kernel_equals_body(case: Case, isa: str, rng: np.random.Generator) -> None:
    weights = linears.make_weights(case, rng)
    kernel, values = Kernel(case, weights), weights.values
    for rows in ROWS:
        x = activations(case, rows, rng)
        used = linears.round_activations(x) if case.activation_bits == 8 else x
        bound = np.abs(used).astype(np.float64) @ np.abs(values).T + np.abs(weights.bias)
        got = kernel(x)
        close(got, used.astype(np.float64) @ values.T + weights.bias, bound)
        close(got, linears.run_body(case, weights, x), bound)
