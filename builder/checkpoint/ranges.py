"""Bounded reads from a file, and blocks of bytes decoded to FP32 piece by piece.

Files are read, not mapped: a mapped tensor stays in the process's resident set after its use, and a file cut
short by someone else while it is mapped kills the process. What is read here is one tensor plus a small piece.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import CheckpointError

PIECE_ELEMENTS = 1 << 20  # elements decoded at a time: 4 MiB of FP32


@dataclass(frozen=True)
class Codec:
    """How a stored dtype becomes FP32.

    decode: UINT8 [blocks * block_bytes] -> FP32 [blocks * block_elements]; it must not depend on how many blocks
    it is given.
    """

    block_elements: int
    block_bytes: int
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]

    def stored_bytes(self, elements: int) -> int:
        return elements // self.block_elements * self.block_bytes


class RangeFile:
    """A file opened for reads at given offsets; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be opened ({e.strerror})") from e
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, count: int) -> NDArray[np.uint8]:
        """`count` bytes from `offset`. Raises CheckpointError if the file does not have them."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path}: {count} bytes at {offset} wanted, the file has {self.size}; it is cut short or damaged"
            )
        data = np.empty(count, np.uint8)
        view, done = data.data, 0
        while done < count:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as e:
                raise CheckpointError(f"{self.path}: reading failed ({e.strerror})") from e
            if got == 0:
                raise CheckpointError(
                    f"{self.path}: ended at {offset + done} while it was read; it was changed meanwhile"
                )
            done += got
        return data

    def read_float32(self, offset: int, shape: tuple[int, ...], codec: Codec) -> NDArray[np.float32]:
        """A tensor of `shape` stored at `offset`, decoded. Memory: the result and one piece."""
        elements = math.prod(shape)
        assert elements % codec.block_elements == 0, "headers are checked before tensors are read"
        if codec is FLOAT32:
            return self.read(offset, 4 * elements).view("<f4").reshape(shape)
        out = np.empty(elements, np.float32)
        step = PIECE_ELEMENTS // codec.block_elements * codec.block_elements
        for start in range(0, elements, step):
            count = min(step, elements - start)
            raw = self.read(offset + codec.stored_bytes(start), codec.stored_bytes(count))
            out[start : start + count] = codec.decode(raw)
        return out.reshape(shape)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "RangeFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain(dtype: str) -> Codec:
    """A numpy dtype, one element a block."""
    item = np.dtype(dtype)

    def decode(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        return raw.view(item).astype(np.float32)

    return Codec(1, item.itemsize, decode)


def _bfloat16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


FLOAT32 = plain("<f4")
BFLOAT16 = Codec(1, 2, _bfloat16)
