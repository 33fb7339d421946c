"""Quantized matrices: integer codes with a scale, and perhaps a minimum, per group of columns of each row.

The same whether a checkpoint has them or a recipe makes them; QuantLinear takes them as they are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.spec import QuantSpec
from trtforge.plugins.quant_linear import ACTIVATION_GROUP

#: Group sizes, tried from the largest that a recipe allows.
GROUP_SIZES = (128, 64, 32)

#: The output head decides the token: where others have four bits it keeps eight. A tied embedding is the head.
HEADS = ("embedding.weight", "lm_head.weight")

#: Values are quantized so many at a time, to keep temporary arrays small.
_SLAB = 1 << 20


@dataclass(frozen=True)
class BlockFormat:
    """How a matrix is stored: value = code * scale (symmetric), or code * scale + minimum.

    exact: the codes are those of the checkpoint; otherwise its values are rounded once more when they are read.
    """

    bits: int  # 4 or 8
    group_size: int  # columns that share a scale; 0: all of a row
    symmetric: bool
    scale_type: str = "FLOAT"  # ONNX's name of the scales' and minimums' type: FLOAT or FLOAT16
    exact: bool = True

    def num_groups(self, columns: int) -> int:
        return columns // self.group_size if self.group_size else 1

    @property
    def code_type(self) -> str:
        """ONNX's name."""
        return f"{'' if self.symmetric else 'U'}INT{self.bits}"

    def bytes(self, rows: int, columns: int) -> int:
        """Of codes, scales and minimums."""
        scale = {"FLOAT": 4, "FLOAT16": 2}[self.scale_type] * (1 if self.symmetric else 2)
        return rows * (columns * self.bits // 8 + self.num_groups(columns) * scale)

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "whole rows"
        return f"{self.bits} bits in {groups}{'' if self.symmetric else ' with minimums'}"


@dataclass(frozen=True)
class Blocks:
    """A quantized matrix [rows, columns].

    codes: [rows, columns], INT8 if symmetric (-8 to 7 in four bits), else UINT8. scales, minimums: FP32 or FP16
    [rows, groups].
    """

    format: BlockFormat
    codes: NDArray[Any]
    scales: NDArray[Any]
    minimums: NDArray[Any] | None = None

    def values(self) -> NDArray[np.float32]:
        """What it stands for, rounded to FP32 after the product and after the sum."""
        groups = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        groups *= self.scales.astype(np.float32)[..., None]
        if self.minimums is not None:
            groups += self.minimums.astype(np.float32)[..., None]
        return groups.reshape(self.codes.shape)

    def rows(self, index: slice | NDArray[np.intp]) -> "Blocks":
        """Some of the rows, in any order."""
        minimums = None if self.minimums is None else self.minimums[index]
        return Blocks(self.format, self.codes[index], self.scales[index], minimums)


INT8_PER_CHANNEL = BlockFormat(8, 0, True, exact=False)


def format_of(quant: QuantSpec, name: str, columns: int, stored: BlockFormat | None) -> BlockFormat | None:
    """How a recipe has the linear's weight `name` [out, columns]; None: as values.

    stored: how the checkpoint has it, if it is quantized there. An input that is no multiple of 32 stays as values.
    """
    if columns % ACTIVATION_GROUP or quant.weights == "none":
        return None
    if quant.weights == "as_is":
        return stored
    bits = {"int8": 8, "int4": 4}[quant.weights]
    if bits == 4 and name in HEADS:
        return INT8_PER_CHANNEL
    if not quant.group_size:
        return BlockFormat(bits, 0, quant.symmetric, exact=False)
    fitting = [g for g in (quant.group_size, *GROUP_SIZES) if g <= quant.group_size and columns % g == 0]
    return BlockFormat(bits, max(fitting), quant.symmetric, exact=False)


def round_to_blocks(values: NDArray[np.float32], fmt: BlockFormat) -> Blocks:
    """Round a matrix [rows, columns] to the nearest codes. A minimum is minus a whole number of scales, so that
    zero is exact."""
    rows, columns = values.shape
    shape = (rows, fmt.num_groups(columns))
    codes = np.empty(values.shape, np.int8 if fmt.symmetric else np.uint8)
    scales = np.empty(shape, np.float32)
    zeros = np.zeros(shape, np.float32)
    step = max(1, _SLAB // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        groups = values[part].reshape(-1, shape[1], columns // shape[1])
        some_codes, scales[part], zeros[part] = _round(groups, fmt)
        codes[part] = some_codes.reshape(-1, columns)
    scale_type = {"FLOAT": np.float32, "FLOAT16": np.float16}[fmt.scale_type]
    minimums = None if fmt.symmetric else (-zeros * scales).astype(scale_type)
    return Blocks(fmt, codes, scales.astype(scale_type), minimums)


def _round(groups: NDArray[np.float32], fmt: BlockFormat) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """[rows, groups, columns of a group] -> (codes of the same shape, scales and zero points [rows, groups])."""
    levels = 2**fmt.bits - 1
    if fmt.symmetric:
        low, high = -(levels // 2), levels // 2
        scales = np.abs(groups).max(-1) / high
        zeros = np.zeros_like(scales)
    else:
        # zero itself must be exact: the range always holds it
        low, high = 0, levels
        least, most = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (most - least) / levels
        zeros = np.rint(-least / _nonzero(scales)).clip(low, high)
    scales = _nonzero(scales.astype(np.float32))
    codes = (np.rint(groups / scales[..., None]) + zeros[..., None]).clip(low, high)
    return codes, scales, zeros


def _nonzero(scales: NDArray[Any]) -> NDArray[Any]:
    """A group of zeros has the scale 1."""
    return np.where(scales == 0, np.ones_like(scales), scales)
