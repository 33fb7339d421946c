"""The GGUF container: metadata, tensor headers, tensor data. What any of it means is gguf.py's business.

The header is walked here rather than by the `gguf` package's reader, which believes every count in the file
(a claimed array of 2^60 strings keeps it busy for ever) and makes an array per string (2 s for 49,000 tokens).
The package gives the block sizes and the dequantization.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.checkpoint.ranges import BFLOAT16, FLOAT32, Codec, RangeFile, plain
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

MAX_HEADER_BYTES = 512 << 20  # the largest vocabularies take 20 MB
MAX_NAME_BYTES = 65535  # the format's own limit for keys; tensor names are far shorter
MAX_DIMENSIONS = 4
MIN_TENSOR_HEADER = 32  # name length, dimension count, one dimension, type, offset
MIN_METADATA_ENTRY = 13  # key length, type, one byte

#: read, besides the plain types below; what else the format has is refused by name
QUANTIZED = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's header. shape: rows first, as numpy has it (the file has the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # in the file


class GGUFFile:
    """One opened GGUF file. metadata: key -> int, float, bool, str, list of str, or a numpy array of numbers.

    Raises CheckpointError for a damaged or hostile file, UnsupportedModel for a version, byte order or tensor
    type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RangeFile(path)
        try:
            self.metadata, self.tensors = _Parser(self._file).parse()
        except BaseException:
            self._file.close()
            raise

    def read(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        return self._file.read_float32(tensor.offset, tensor.shape, codecs()[tensor.dtype])

    def read_raw(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The tensor's bytes as they are stored."""
        return self._file.read(tensor.offset, codecs()[tensor.dtype].stored_bytes(math.prod(tensor.shape)))

    def close(self) -> None:
        self._file.close()


@cache
def codecs() -> dict[str, Codec]:
    """The tensor types that are read."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    def quantized(name: str) -> Codec:
        kind = GGMLQuantizationType[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]

        def decode(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
            with np.errstate(all="ignore"):  # a damaged scale may be infinite: arithmetic, not an error
                return dequantize(raw.reshape(-1, block_bytes), kind).reshape(-1)

        return Codec(block_elements, block_bytes, decode)

    simple = {"F32": FLOAT32, "F16": plain("<f2"), "BF16": BFLOAT16, "F64": plain("<f8")}
    return simple | {name: quantized(name) for name in QUANTIZED}


class _Parser:
    """A cursor over the header that never believes a length before it has compared it with what is left."""

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self._limit = min(file.size, MAX_HEADER_BYTES)
        self._position = 0
        self._buffer, self._buffer_start = b"", 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        tensor_count, metadata_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                raise self._fault(f"metadata key {key[:200]!r} stands twice")
            metadata[key] = self._value(key)
        headers = [self._tensor_header() for _ in range(tensor_count)]
        return metadata, self._place(headers, self._alignment(metadata))

    def _preamble(self) -> tuple[int, int]:
        if self._file.size < 24 or self._take(4) != b"GGUF":
            raise CheckpointError(
                f"{self._file.path}: not a GGUF file (it does not begin with GGUF, or is cut short)"
            )
        version: int = self._number("I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(
                f"{self._file.path}: a big-endian GGUF file, which is not read; convert it again"
            )
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{self._file.path}: GGUF version {version}; read are 2 and 3, convert it again"
            )
        tensor_count, metadata_count = self._number("Q"), self._number("Q")
        left = self._limit - self._position
        if tensor_count * MIN_TENSOR_HEADER > left or metadata_count * MIN_METADATA_ENTRY > left:
            raise self._fault(
                f"it claims {tensor_count} tensors and {metadata_count} metadata entries, more than fit in it"
            )
        return tensor_count, metadata_count

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        raise self._fault(f"metadata {key[:200]!r} has the unknown type {kind}")

    def _array(self, key: str) -> Any:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._check(8 * count, f"metadata {key[:200]!r}, an array of {count} strings,")
            return [self._string(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._fault(f"metadata {key[:200]!r} is an array of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        self._check(dtype.itemsize * count, f"metadata {key[:200]!r}, an array of {count} numbers,")
        return np.frombuffer(self._take(dtype.itemsize * count), dtype)

    def _tensor_header(self) -> tuple[GGUFTensor, Codec]:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._fault(f"tensor {name[:200]!r} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        dtype, offset = self._dtype(name, self._number("I")), self._number("Q")
        codec = codecs()[dtype]
        # plain integers: nothing here can overflow
        if (
            0 in shape
            or shape[-1] % codec.block_elements
            or codec.stored_bytes(math.prod(shape)) > self._file.size
        ):
            raise self._fault(
                f"tensor {name[:200]!r} is {dtype} of shape {list(shape)}, which cannot be in it"
            )
        return GGUFTensor(name, shape, dtype, offset), codec

    def _dtype(self, name: str, number: int) -> str:
        from gguf.constants import GGMLQuantizationType

        try:
            dtype = GGMLQuantizationType(number).name
        except ValueError as e:
            raise self._fault(f"tensor {name[:200]!r} has the unknown type {number}") from e
        if dtype not in codecs():
            raise UnsupportedModel(
                f"{self._file.path}: tensor {name[:200]!r} has type {dtype}; read are {', '.join(codecs())}"
            )
        return dtype

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._fault("its general.alignment is no power of two")
        return alignment

    def _place(self, headers: list[tuple[GGUFTensor, Codec]], alignment: int) -> dict[str, GGUFTensor]:
        """Offsets in the file, each tensor inside it and none over another."""
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end = start
        for header, codec in sorted(headers, key=lambda item: item[0].offset):
            offset = start + header.offset
            if header.name in tensors:
                raise self._fault(f"tensor {header.name[:200]!r} stands twice")
            if header.offset % alignment or offset < end:
                raise self._fault(f"tensor {header.name[:200]!r} overlaps another one or is not aligned")
            end = offset + codec.stored_bytes(math.prod(header.shape))
            if end > self._file.size:
                raise self._fault(
                    f"tensor {header.name[:200]!r} ends at {end}, the file at {self._file.size}"
                )
            tensors[header.name] = GGUFTensor(header.name, header.shape, header.dtype, offset)
        return tensors

    def _string(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > limit:
            raise self._fault(f"{what[:200]!r} claims {length} bytes")
        self._check(length, f"{what[:200]!r}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as e:
            raise self._fault(f"{what[:200]!r} is not UTF-8") from e

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, count: int) -> bytes:
        """The next `count` bytes, through a buffer of a MiB."""
        self._check(count, "its header")
        begin = self._position - self._buffer_start
        if begin + count > len(self._buffer):
            amount = min(max(count, 1 << 20), self._limit - self._position)
            self._buffer, self._buffer_start, begin = (
                self._file.read(self._position, amount).tobytes(),
                self._position,
                0,
            )
        self._position += count
        return self._buffer[begin : begin + count]

    def _check(self, count: int, what: str) -> None:
        if count > self._limit - self._position:
            raise self._fault(f"{what} runs past its end")

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file.path}: {what}; the file is cut short or damaged, download it again"
        )
