"""Token ids to text, one token at a time, in constant time each.

Every token is a piece of bytes, and the text is those bytes read as UTF-8: so a stream gives out what is
complete and holds back half a character or what may become a stop string. Bytes that are no UTF-8 become
U+FFFD.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtforge.plugins.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for 256, 257, ... in
    order.
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}


@dataclass(frozen=True)
class TokenBytes:
    """Each token's bytes; empty for special tokens, which are not text.

    strip_spaces: how many spaces a text loses at its start (SentencePiece puts one before the first word).
    """

    pieces: Sequence[bytes]
    strip_spaces: int = 0

    def __getitem__(self, token_id: int) -> bytes:
        """Ids past the tokenizer's own (a padded vocabulary) have no text."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    @classmethod
    def from_tokenizer_json(cls, tokenizer: Mapping[str, Any], where: str) -> "TokenBytes":
        """Raises UnsupportedModel for a tokenizer whose decoder is neither byte-level nor SentencePiece's."""
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [piece, score]
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        added = {t["id"]: t for t in tokenizer.get("added_tokens", ())}
        decoder = _Decoder.read(tokenizer.get("decoder"), where)
        pieces = [b""] * (1 + max([*vocab.values(), *added], default=-1))
        for token, i in vocab.items():
            pieces[i] = decoder.piece(token)
        for i, token in added.items():
            pieces[i] = b"" if token.get("special") else decoder.piece(token["content"])
        return cls(pieces, decoder.strip_spaces)


@dataclass
class _Decoder:
    """What a tokenizer.json's `decoder` does, as far as one token at a time can tell."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strip_spaces: int = 0

    @classmethod
    def read(cls, raw: Mapping[str, Any] | None, where: str) -> "_Decoder":
        decoder = cls()
        steps = [] if raw is None else raw["decoders"] if raw["type"] == "Sequence" else [raw]
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel":
                decoder.byte_level = True
            elif kind == "ByteFallback":
                decoder.byte_fallback = True
            elif kind == "Replace" and "String" in step["pattern"]:
                decoder.replace += ((step["pattern"]["String"], step["content"]),)
            elif kind == "Metaspace":
                decoder.replace += ((step["replacement"], " "),)
                decoder.strip_spaces = 0 if step.get("prepend_scheme") == "never" else 1
            elif kind == "Strip" and step["content"] == " " and not step["stop"]:
                decoder.strip_spaces = step["start"]
            elif kind != "Fuse":
                raise UnsupportedModel(
                    f"{where}: its decoder has a step {kind!r}; done are ByteLevel, ByteFallback, Fuse, Metaspace, "
                    "Replace and Strip"
                )
        return decoder

    def piece(self, token: str) -> bytes:
        if self.byte_level:
            codes = [_ALPHABET.get(c) for c in token]
            # A token with a character outside the alphabet was added as plain text.
            return token.encode() if None in codes else bytes(c for c in codes if c is not None)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replace:
            token = token.replace(old, new)
        return token.encode()


_ALPHABET = _byte_level_alphabet()


class Detokenizer:
    """The text of one request's output as it grows.

    The output continues the prompt: the space that SentencePiece puts before a first word is dropped only
    where nothing stands before it, so that prompt and output put together read right.

    stop: strings that end the text, not part of it. `stopped_by` is the one that did. Where several would, it
    is the one that is complete first, and of those the longest; so the text does not depend on how it is cut
    up.
    """

    def __init__(
        self, token_bytes: TokenBytes, prompt_ids: Iterable[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.stopped_by: str | None = None
        self._bytes = token_bytes
        self._stop = tuple(stop)
        self._held = ""  # may be the beginning of a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_split = False  # whether the decoder holds a part of a character
        strip = token_bytes.strip_spaces and not any(token_bytes[i] for i in prompt_ids)
        self._spaces_to_strip = token_bytes.strip_spaces if strip else 0

    def feed(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str:
        """The text that these tokens add and that no later token can change. Nothing after a stop string.

        may_stop: whether a stop string counts yet.
        """
        return self._advance(b"".join([self._bytes[i] for i in token_ids]), False, may_stop)

    def finish(self, *, may_stop: bool = True) -> str:
        """The text that was held back, at the end of the output; half a character becomes U+FFFD."""
        text = self._advance(b"", True, may_stop) + self._held
        self._held = ""
        return text

    def _advance(self, data: bytes, final: bool, may_stop: bool) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._decode(data, final)
        if self._spaces_to_strip and text:
            stripped = text.lstrip(" ")
            spaces = min(len(text) - len(stripped), self._spaces_to_strip)
            self._spaces_to_strip = self._spaces_to_strip - spaces if not text[spaces:] else 0
            text = text[spaces:]
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        if may_stop and (found := self._first_stop(text)):
            end, self.stopped_by = found
            return text[: end - len(self.stopped_by)]
        keep = self._stop_prefix(text) if may_stop else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, data: bytes, final: bool) -> str:
        if not self._is_split:
            try:
                return data.decode()  # nearly always; a fraction of the incremental decoder's time
            except UnicodeDecodeError:
                pass
        text = self._utf8.decode(data, final)
        self._is_split = bool(self._utf8.getstate()[0])
        return text

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """(where it ends, the stop string) of the one that is complete first."""
        found = [(at + len(s), -len(s), s) for s in self._stop if (at := text.find(s)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _stop_prefix(self, text: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
