"""Text to token ids and back, by the files of an engine directory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.plugins.errors import EngineFormatError, InvalidArgument
from trtforge.runtime.detokenizer import TokenBytes

if TYPE_CHECKING:
    from trtforge.runtime.chat_template import ChatTemplate

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


class Tokenizer:
    """tokenizer_json: in the format of the `tokenizers` library. config: tokenizer_config.json."""

    def __init__(
        self,
        tokenizer_json: str,
        config: Mapping[str, Any],
        template: str | None = None,
        where: str = TOKENIZER,
    ) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_str(tokenizer_json)
        except Exception as e:  # the library raises Exception itself
            raise EngineFormatError(f"{where}: the tokenizer cannot be read: {e}") from e
        self._fast.no_padding()
        self._fast.no_truncation()
        self._json = tokenizer_json
        self._config = config
        self._template = template
        self._where = where
        self._bos_id = self._fast.token_to_id(self.special_tokens.get("bos_token", ""))

    @classmethod
    def load(cls, engine_dir: Path) -> "Tokenizer":
        """Raises EngineFormatError for files that are not there or damaged."""
        path = engine_dir / TOKENIZER
        config, template = engine_dir / TOKENIZER_CONFIG, engine_dir / CHAT_TEMPLATE
        try:
            settings = json.loads(config.read_text("utf-8")) if config.is_file() else {}
            if not isinstance(settings, dict):
                raise EngineFormatError(f"{config}: not a JSON object; build the engine again")
            return cls(
                path.read_text("utf-8"),
                settings,
                template.read_text("utf-8") if template.is_file() else None,
                str(path),
            )
        except (OSError, ValueError) as e:
            raise EngineFormatError(f"{engine_dir}: the tokenizer cannot be read: {e}") from e

    @property
    def special_tokens(self) -> dict[str, str]:
        """Of the config: name (bos_token, eos_token, ...) -> text. A text may lie in an object with
        `content`.
        """
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in self._config.items()}
        return {k: v for k, v in texts.items() if k.endswith("_token") and isinstance(v, str)}

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size())

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """By the tokenizer's own rule for special tokens, but never with two BOS: text that brings its own
        gets no other. Raises InvalidArgument for text that is not valid Unicode, and at once for text that
        cannot be `max_tokens` tokens or fewer.
        """
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise InvalidArgument(
                f"the text has {len(text)} characters; {max_tokens} tokens, which are the most there may be, "
                f"hold {max_tokens * self._longest_token} at best"
            )
        try:
            # As a batch, since only then other threads run meanwhile; fast, since nobody asks for offsets.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        except (UnicodeEncodeError, TypeError) as e:
            raise InvalidArgument(f"the text is not valid Unicode: {e}") from e
        if add_special_tokens and self._bos_id is not None:
            if ids[:1] != [self._bos_id] and self._config.get("add_bos_token"):
                ids.insert(0, self._bos_id)
            elif ids[:2] == [self._bos_id] * 2:
                del ids[0]
        return list(ids)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None
    ) -> list[int]:
        """Chat turns through the model's own template, which brings all the special tokens that it wants.

        Raises InvalidArgument if the model has no template, for messages that it refuses, and as `encode`.
        """
        text = self.chat_template.render(messages)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of these tokens by the `tokenizers` library; a stream goes through `Detokenizer`."""
        return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def _longest_token(self) -> int:
        """In characters of the vocabulary's own spelling, where a byte or a character of text is one."""
        return max(map(len, self._fast.get_vocab()))

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        from trtforge.runtime.chat_template import WITHOUT_TEMPLATE, ChatTemplate

        if self._template is None:
            raise InvalidArgument(f"the model has no chat template; {WITHOUT_TEMPLATE}")
        return ChatTemplate(self._template, self.special_tokens)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The table that detokenizers share."""
        return TokenBytes.from_tokenizer_json(json.loads(self._json), self._where)
