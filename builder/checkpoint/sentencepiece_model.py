"""A SentencePiece `tokenizer.model`, read without its library: the few fields of its protobuf that are needed.

Messages and field numbers: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtforge.builder.checkpoint.tokenizer_build import TokenType
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

MAX_BYTES = 64 << 20  # the largest in use has 4 MB
_BPE = 2

_Value = int | float | memoryview


@dataclass(frozen=True)
class SentencePieceModel:
    """A BPE model. bos, eos: ids, None where the model has none."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    bos_token_id: int | None
    eos_token_id: int | None
    add_space_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Raises CheckpointError for a damaged file, UnsupportedModel for a model that is not plain BPE."""
    try:
        with path.open("rb") as f:
            data = f.read(MAX_BYTES + 1)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path}: over {MAX_BYTES} bytes, which no SentencePiece model needs")
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    try:
        for number, value in _fields(memoryview(data)):
            if not isinstance(value, memoryview):
                continue
            if number == 1:
                pieces.append(_piece(value))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
    except (ValueError, struct.error, IndexError) as e:
        raise CheckpointError(f"{path}: not a SentencePiece model, or a damaged one ({e})") from e
    if not pieces:
        raise CheckpointError(f"{path}: a SentencePiece model without tokens")
    _refuse_other_kinds(path, trainer, normalizer)
    ids = [_id(trainer.get(number, default), len(pieces)) for number, default in ((41, 1), (42, 2))]
    return SentencePieceModel(
        tokens=[text for text, _, _ in pieces],
        scores=[score for _, score, _ in pieces],
        types=[kind for _, _, kind in pieces],
        bos_token_id=ids[0],
        eos_token_id=ids[1],
        add_space_prefix=bool(normalizer.get(3, 1)),
    )


def _refuse_other_kinds(path: Path, trainer: dict[int, _Value], normalizer: dict[int, _Value]) -> None:
    advice = "save its tokenizer.json with transformers (use_fast=True) beside it"
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedModel(f"{path}: a SentencePiece model that is not BPE; {advice}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise UnsupportedModel(
            f"{path}: a SentencePiece model that normalizes text or drops white space; {advice}"
        )


def _id(value: _Value, count: int) -> int | None:
    return value if isinstance(value, int) and value < count else None  # -1 is stored as 2^64 - 1


def _piece(data: memoryview) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, int(TokenType.NORMAL)
    for number, value in _fields(data):
        if number == 1 and isinstance(value, memoryview):
            text = bytes(value).decode()
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: memoryview) -> Iterator[tuple[int, _Value]]:
    """The fields of one protobuf message: varints as int, 32 bits as float, the rest as bytes; groups are refused."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        else:
            length = {1: 8, 5: 4}.get(wire, -1)
        if length < 0 or length > len(data) - position:
            raise ValueError(f"field {number} runs past the end")
        content = data[position : position + length]
        position += length
        yield number, struct.unpack("<f", content)[0] if wire == 5 else content


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than ten bytes")
