"""The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes back to back.

The header is parsed here rather than by the library, because every number in it is checked against the file
before it is believed, and each fault gets its own sentence.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.checkpoint.ranges import BFLOAT16, FLOAT32, Codec, RangeFile, plain
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8

CODECS: dict[str, Codec] = {
    "F32": FLOAT32,
    "F16": plain("<f2"),
    "BF16": BFLOAT16,
    "F64": plain("<f8"),
    "I8": plain("i1"),
    "U8": plain("u1"),
    "I16": plain("<i2"),
    "U16": plain("<u2"),
    "I32": plain("<i4"),
    "U32": plain("<u4"),
    "I64": plain("<i8"),
    "U64": plain("<u8"),
    "BOOL": plain("?"),
}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    offset: int  # in the file


class SafetensorsFile:
    """One `.safetensors` file. Raises CheckpointError for a damaged or hostile one, UnsupportedModel for a
    tensor dtype that is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RangeFile(path)
        try:
            self._entries = _parse_header(self._file)
        except BaseException:
            self._file.close()
            raise
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        entry = self._entries[name]
        return self._file.read_float32(entry.offset, entry.info.shape, CODECS[entry.info.dtype])

    def close(self) -> None:
        self._file.close()


def _parse_header(file: RangeFile) -> dict[str, _Entry]:
    where = file.path
    if file.size < 8:
        raise CheckpointError(
            f"{where}: {file.size} bytes, too short for a safetensors file; download it again"
        )
    length = int(file.read(0, 8).view("<u8")[0])
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise CheckpointError(
            f"{where}: its header claims {length} bytes, the file has {file.size}; "
            "it is cut short or no safetensors file"
        )
    header = parse_json(file.read(8, length).tobytes(), where, "its header")
    header.pop("__metadata__", None)
    data_start = 8 + length
    entries = {name: _entry(where, name, value, data_start, file.size) for name, value in header.items()}
    _check_layout(where, entries, data_start, file.size)
    return entries


def _entry(where: Path, name: str, value: Any, data_start: int, file_size: int) -> _Entry:
    """One tensor's header, its numbers checked against each other and against the file."""

    def lies(what: str) -> CheckpointError:
        return CheckpointError(
            f"{where}: tensor {name[:200]!r}: {what}; the file is damaged, download it again"
        )

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise lies("no dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise lies("its shape is no list of sizes")
    if not _counts(offsets) or len(offsets) != 2:
        raise lies("its data_offsets are not two numbers")
    if not isinstance(dtype, str) or dtype not in CODECS:
        raise UnsupportedModel(
            f"{where}: tensor {name[:200]!r} has dtype {str(dtype)[:40]!r}; read are {', '.join(CODECS)}"
        )
    begin, end = offsets
    if end < begin or data_start + end > file_size:
        raise lies(f"its bytes {begin}..{end} are not in the file of {file_size} bytes")
    # plain integers: nothing here can overflow
    if math.prod(shape) * CODECS[dtype].block_bytes != end - begin:
        raise lies(
            f"{dtype} of shape {shape[:MAX_DIMENSIONS]} does not take the {end - begin} bytes that it claims"
        )
    return _Entry(TensorInfo(name, tuple(shape), dtype), data_start + begin)


def _check_layout(where: Path, entries: dict[str, _Entry], data_start: int, file_size: int) -> None:
    """The format allows no gap and no overlap: the tensors cover the file's data exactly once."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, _bytes(item[1]))):
        if entry.offset != position:
            fault = "overlaps another one" if entry.offset < position else "has a gap before it"
            raise CheckpointError(
                f"{where}: tensor {name[:200]!r} {fault}; the file is damaged, download it again"
            )
        position += _bytes(entry)
    if position != file_size:
        raise CheckpointError(
            f"{where}: {file_size - position} bytes after the last tensor; download the file again"
        )


def _bytes(entry: _Entry) -> int:
    return CODECS[entry.info.dtype].block_bytes * math.prod(entry.info.shape)


def _counts(value: Any) -> bool:
    """A list of non-negative integers; booleans and floats that compare equal are not."""
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def parse_json(data: bytes, where: Path, what: str) -> dict[str, Any]:
    """A JSON object from an untrusted file; duplicate keys are refused, since readers disagree on who wins."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key stands twice")
        return value

    try:
        value = json.loads(data, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise CheckpointError(
            f"{where}: {what} is not JSON that can be read ({reason}); download it again"
        ) from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {what} is not a JSON object; download it again")
    return value
