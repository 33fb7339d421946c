"""GGUF's quantized blocks taken apart without loss: codes, scales and minimums instead of values.

A type is here if each of its values is code * scale + minimum with one scale and one minimum per 32 columns. The
others (Q2_K, Q3_K and Q6_K: groups of 16) are read as values and rounded to 8 bits. Bit layouts: llama.cpp,
ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks

Bytes = NDArray[Any]  # uint8
#: (codes [blocks, values of a block], scales [blocks, groups of a block], minimums or None)
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]

GROUP = 32
#: The 16 levels of IQ4_NL and IQ4_XS.
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class BlockType:
    """A GGUF type: its block's size, what becomes of it, and how (UINT8 [blocks, block_bytes] -> Parts)."""

    block_values: int
    block_bytes: int
    format: BlockFormat
    split: Callable[[Bytes], Parts]


def read_blocks(raw: Bytes, kind: BlockType, shape: tuple[int, int], piece: int = 1 << 20) -> Blocks:
    """A matrix [rows, columns] from its stored bytes. Memory: the result and about `piece` values."""
    rows, columns = shape
    stored = raw.reshape(-1, kind.block_bytes)
    codes = np.empty((len(stored), kind.block_values), np.int8 if kind.format.symmetric else np.uint8)
    groups = kind.block_values // GROUP
    scales = np.empty(
        (len(stored), groups), {"FLOAT": np.float32, "FLOAT16": np.float16}[kind.format.scale_type]
    )
    minimums = None if kind.format.symmetric else np.empty_like(scales)
    step = piece // kind.block_values
    for start in range(0, len(stored), step):
        part = slice(start, start + step)
        with np.errstate(all="ignore"):  # a damaged scale may be infinite: arithmetic, not an error
            some_codes, scales[part], some_minimums = kind.split(stored[part])
        codes[part] = some_codes
        if minimums is not None:
            minimums[part] = some_minimums
    by_row = (rows, columns // GROUP)
    return Blocks(
        kind.format,
        codes.reshape(rows, columns),
        scales.reshape(by_row),
        None if minimums is None else minimums.reshape(by_row),
    )


def _nibbles(packed: Bytes, half: int) -> Bytes:
    """[blocks, n] -> [blocks, 2 n]: of each `half` bytes first all low nibbles, then all high ones."""
    halves = packed.reshape(len(packed), -1, 1, half)
    both: Bytes = np.concatenate([halves & 15, halves >> 4], axis=2)
    return both.reshape(len(packed), -1)


def _half(raw: Bytes, at: int) -> NDArray[np.float16]:
    """[blocks, 1]: the FP16 number at a byte offset."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16)


def _fifth_bits(raw: Bytes, at: int) -> Bytes:
    """[blocks, 32]: 16 in the places of the bits that are set in four bytes, else 0."""
    return np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 2:], 16).view(np.int8) - np.int8(8), _half(raw, 0), None


def _q4_1(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 4:], 16), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Bytes) -> Parts:
    codes = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw, 2)
    return codes.view(np.int8) - np.int8(16), _half(raw, 0), None


def _q5_1(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 8:], 16) | _fifth_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Bytes) -> Parts:
    return raw[:, 2:].view(np.int8), _half(raw, 0), None


def _iq4_nl(raw: Bytes) -> Parts:
    return LEVELS[_nibbles(raw[:, 2:], 16)], _half(raw, 0), None


def _iq4_xs(raw: Bytes) -> Parts:
    low = _nibbles_in_order(raw[:, 4:8])
    high = np.ascontiguousarray(raw[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, np.uint16)
    scales = (low | (high.astype(np.uint8) & 3) << 4).astype(np.float32) - 32
    return LEVELS[_nibbles(raw[:, 8:], 16)], _half(raw, 0).astype(np.float32) * scales, None


def _nibbles_in_order(packed: Bytes) -> Bytes:
    both: Bytes = np.stack([packed & 15, packed >> 4], axis=2)
    return both.reshape(len(packed), -1)


def _q4_k(raw: Bytes) -> Parts:
    return _nibbles(raw[:, 16:], 32), *_k_scales(raw)


def _q5_k(raw: Bytes) -> Parts:
    fifth = (raw[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1) << 4
    return _nibbles(raw[:, 48:], 32) | fifth.reshape(len(raw), -1), *_k_scales(raw)


def _k_scales(raw: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and minimums of the eight groups of a 256-value block: FP16 units times 6-bit numbers, exact in FP32.

    Of 12 bytes the first four hold scales 0-3, the next four minimums 0-3, in six bits each; nibbles of the last
    four hold the low bits of numbers 4-7, whose high bits are in the top of the first eight.
    """
    first, second, last = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 2 & 48], axis=1)
    minimums = np.concatenate([second & 63, last >> 4 | second >> 2 & 48], axis=1)
    unit, minimum_unit = _half(raw, 0).astype(np.float32), _half(raw, 2).astype(np.float32)
    return unit * scales.astype(np.float32), -(minimum_unit * minimums.astype(np.float32))


def _format(bits: int, symmetric: bool, scale_type: str = "FLOAT16") -> BlockFormat:
    return BlockFormat(bits, GROUP, symmetric, scale_type)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, _format(4, True), _q4_0),
    "Q4_1": BlockType(32, 20, _format(4, False), _q4_1),
    "Q5_0": BlockType(32, 22, _format(8, True), _q5_0),
    "Q5_1": BlockType(32, 24, _format(8, False), _q5_1),
    "Q8_0": BlockType(32, 34, _format(8, True), _q8_0),
    "Q4_K": BlockType(256, 144, _format(4, False, "FLOAT"), _q4_k),
    "Q5_K": BlockType(256, 176, _format(8, False, "FLOAT"), _q5_k),
    "IQ4_NL": BlockType(32, 18, _format(8, True), _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _format(8, True, "FLOAT"), _iq4_xs),
}

#: What values of the other quantized types are rounded to.
ROUNDED = BlockFormat(8, GROUP, True, exact=False)
