"""The layout of a linear's weights that the CPU kernel reads: one tensor of bytes per linear, made once per build.

Rows (output features) are interleaved by 16, so that a vector register holds four successive codes of each of 16
(or half of them, of 8) rows. A row block is its groups of columns one after the other, padded with zeros to a
multiple of 64 bytes, so that weights are read from front to back. A group is, everything little-endian,

    codes    32 columns after 32 columns; 8-bit: column 4 c + j of row r at byte 64 c + 4 r + j (512 bytes);
             4-bit: the same with chunks c = 0..3 in the low halves of 256 bytes, c = 4..7 in the high halves
    scales   [16] of FP16 or FP32
    minimums [16] likewise, if there are any

Signed codes are stored with 8 or 128 added, so all are unsigned. Rows past out_features are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Goes up with every change of the layout above: engines hold packed weights.
PACKING_VERSION = 1

#: Rows that are interleaved, and columns whose codes lie together.
ROWS, COLUMNS = 16, 32
_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedLayout:
    """Shape and storage of one packed linear; the attributes of a PackedLinear node.

    zero_point: 0 for unsigned codes; 8 (INT4) or 128 (INT8) for signed ones.
    """

    in_features: int
    out_features: int
    bits: int
    zero_point: int
    group_size: int
    scale_bits: int
    has_minimums: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(row blocks, bytes of each)."""
        block = -(-(self.in_features // self.group_size * self.group_bytes) // _ALIGNMENT) * _ALIGNMENT
        return -(-self.out_features // ROWS), block

    @property
    def group_bytes(self) -> int:
        """Of a row block's codes, scales and minimums of group_size columns."""
        numbers = self.scale_bits // 8 * (2 if self.has_minimums else 1)
        return ROWS * (self.group_size * self.bits // 8 + numbers)

    @property
    def format(self) -> str:
        """How a fused op's attribute says what its linear's bytes are, sizes aside."""
        numbers = (self.bits, self.zero_point, self.group_size, self.scale_bits, int(self.has_minimums))
        return " ".join(map(str, numbers))

    def attributes(self, activation_bits: int) -> dict[str, int]:
        """Of the PackedLinear node."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bits": self.bits,
            "zero_point": self.zero_point,
            "group_size": self.group_size,
            "scale_bits": self.scale_bits,
            "has_minimums": int(self.has_minimums),
            "activation_bits": activation_bits,
        }


def packed_layout(
    shape: tuple[int, int], code_type: str, group_size: int, scale_type: str, has_minimums: bool
) -> PackedLayout:
    """The layout of QuantLinear's inputs: codes [N, K] of ONNX type `code_type` (UINT4, INT4, UINT8, INT8), scales
    of FLOAT16 or FLOAT. has_minimums: the minimums are [N, K / group_size], not a zero [1, 1]."""
    rows, columns = shape
    assert columns % group_size == 0 and group_size % COLUMNS == 0, (shape, group_size)
    bits, zero_point = {"UINT4": (4, 0), "INT4": (4, 8), "UINT8": (8, 0), "INT8": (8, 128)}[code_type]
    scale_bits = {"FLOAT16": 16, "FLOAT": 32}[scale_type]
    return PackedLayout(columns, rows, bits, zero_point, group_size, scale_bits, has_minimums)


def pack(
    layout: PackedLayout, codes: NDArray[Any], scales: NDArray[Any], minimums: NDArray[Any] | None = None
) -> NDArray[np.uint8]:
    """Bytes of `layout.shape`. codes: [N, K], one number per element (numpy's 8-bit or ml_dtypes' 4-bit types);
    scales, minimums: [N, K / group_size] of the layout's float type. Working memory is a few row blocks'."""
    import numpy as np

    assert codes.shape == (layout.out_features, layout.in_features), codes.shape
    assert (minimums is not None) == layout.has_minimums
    out = np.zeros(layout.shape, np.uint8)
    slab = max(1, (1 << 22) // (ROWS * layout.in_features))  # row blocks at a time
    for first in range(0, layout.shape[0], slab):
        part = slice(first * ROWS, (first + slab) * ROWS)
        rows = np.asarray(codes[part])
        blocks = -(-len(rows) // ROWS)
        parts = [_interleave(rows, layout)]
        parts += [_transpose(values[part], layout) for values in (scales, minimums) if values is not None]
        groups = np.concatenate(parts, axis=2).reshape(blocks, -1)
        out[first : first + blocks, : groups.shape[1]] = groups
    return out


def _interleave(rows: NDArray[Any], layout: PackedLayout) -> NDArray[np.uint8]:
    """Codes [rows, K] -> bytes [row blocks, G, group_size * 16 * bits / 8]."""
    import numpy as np

    signed: NDArray[np.int16] = rows.astype(np.int16)
    padded = _pad(signed + np.int16(layout.zero_point)).astype(np.uint8)
    chunks = padded.reshape(-1, ROWS, layout.in_features // COLUMNS, COLUMNS // 4, 4)
    chunks = chunks.transpose(0, 2, 3, 1, 4)  # [row blocks, K / 32, chunk, row, column]
    if layout.bits == 4:
        low, high = chunks[:, :, : COLUMNS // 8], chunks[:, :, COLUMNS // 8 :]
        chunks = low | high << np.uint8(4)
    return chunks.reshape(len(chunks), layout.in_features // layout.group_size, -1)


def _transpose(values: NDArray[Any], layout: PackedLayout) -> NDArray[np.uint8]:
    """[rows, G] of floats -> bytes [row blocks, G, 16 * scale_bits / 8]."""
    import numpy as np

    assert values.shape[1] == layout.in_features // layout.group_size, values.shape
    wanted = {16: np.float16, 32: np.float32}[layout.scale_bits]
    assert values.dtype == wanted, (values.dtype, layout.scale_bits)
    blocks = _pad(np.asarray(values)).reshape(-1, ROWS, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(blocks).view(np.uint8)


def _pad(rows: NDArray[Any]) -> NDArray[Any]:
    """Zero rows up to a whole number of row blocks."""
    import numpy as np

    missing = -len(rows) % ROWS
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)]) if missing else rows
