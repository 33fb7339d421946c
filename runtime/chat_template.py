"""The model's own chat template, run as Hugging Face runs it: Jinja in a sandbox, with the same few
helpers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtforge.plugins.errors import EngineFormatError, InvalidArgument


class _GenerationBlock(Extension):
    """`{% generation %}`: marks what an assistant said, for training; here its body and no more."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """special_tokens: what the template may name, e.g. {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str = "chat_template") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson  # jinja's own escapes HTML
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise EngineFormatError(f"{where}: the chat template does not parse: {e}") from e

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant speaks. Raises InvalidArgument for messages that are
        not chat turns, or that the template refuses (its own words are in the message).
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as e:
            raise InvalidArgument(f"messages: the model's chat template refuses them: {e}") from e


def check_messages(messages: object) -> None:
    """Raises InvalidArgument unless this is a list of chat turns, each with a role and a text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidArgument(
            'messages: must be a list of {"role": ..., "content": ...}, with one turn at least'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgument(f"messages[{i}]: must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidArgument(f"messages[{i}].{key}: must be a string")


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
