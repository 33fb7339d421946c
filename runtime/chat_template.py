"""The model's own chat template, run as Hugging Face runs it: Jinja in a sandbox, with the same few
helpers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtforge.plugins.errors import InvalidArgument

WITHOUT_TEMPLATE = "give its prompt as plain text, without --chat or messages"

#: Names that a message's reasoning has; Hugging Face gives it to a template under the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")


class _GenerationBlock(Extension):
    """`{% generation %}`: marks what an assistant said, for training; here its body and no more."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """special_tokens: what the template may name, e.g. {"bos_token": "<s>"}. Raises InvalidArgument for a source that
    is no template: the model is then as one that has none.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson  # jinja's own escapes HTML
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as e:  # the last two: nested too deep
            line = f"line {e.lineno}: " if isinstance(e, jinja2.TemplateSyntaxError) else ""
            raise InvalidArgument(
                f"the model's chat template does not parse ({line}{e.args[0]}); {WITHOUT_TEMPLATE}"
            ) from e

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt's text, up to where the assistant speaks. Raises InvalidArgument for messages that are
        not chat turns, or that the template refuses (its own words are in the message).
        """
        check_messages(messages)
        turns = [_without_none(m) for m in messages]
        if any(isinstance(t.get("content"), list) for t in turns) and not self._takes_parts:
            turns = [{**t, "content": _joined(t["content"])} if "content" in t else t for t in turns]
        return self._render(turns)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template goes through a list of parts, found by doing it. Others write out the list in Python's
        notation, drop it or fail."""
        part = {"type": "text", "text": "probe"}
        try:
            rendered = self._render([{"role": "user", "content": [part]}])
        except InvalidArgument:
            return False
        return part["text"] in rendered and str(part) not in rendered

    def _render(self, turns: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=turns,
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
    """Raises InvalidArgument unless this is a list of chat turns, each with a role and a content: a text, or a list of
    text parts. A turn with tool_calls needs none.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidArgument(
            'messages: must be a list of {"role": ..., "content": ...}, with one turn at least'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgument(f"messages[{i}]: must be an object with role and content")
        if not isinstance(message.get("role"), str):
            raise InvalidArgument(f"messages[{i}].role: must be a string")
        content = message.get("content")
        if isinstance(content, list) and content:
            check_parts(content, f"messages[{i}].content")
        elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            raise InvalidArgument(f"messages[{i}].content: must be a string or a list of text parts")


def check_parts(parts: Sequence[Any], where: str) -> None:
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidArgument(f'{where}[{i}]: must be an object such as {{"type": "text", "text": ...}}')
        if part["type"] != "text":
            raise InvalidArgument(f"{where}[{i}]: {part['type']!r} parts are not supported, only 'text'")
        if not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{where}[{i}].text: must be a string")


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    """As Hugging Face gives it to a template: absent where clients say null, reasoning under the usual names."""
    turn = {key: value for key, value in message.items() if value is not None}
    reasoning = next((turn[key] for key in REASONING if key in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    """The texts with nothing between them, as templates that take parts write them."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
