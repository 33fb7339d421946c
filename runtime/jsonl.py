"""Lines of a prompts file as requests, and outputs as lines.

A line is a JSON object: `prompt` or `token_ids` or `messages`, an optional `id`, and any of the names in
FIELDS.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.request import GenerationRequest, RequestOutput, SamplingParams
from trtforge.runtime.tokenizer import Tokenizer


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("must be an integer")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("must be a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be a string")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """One string or a list of them."""
    if not isinstance(value, list):
        value = [value]
    return tuple(_text(v) for v in value)


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("must be a list of integers")
    return tuple(_integer(v) for v in value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise TypeError("must be an object of token id to number")
    return {int(token): _number(bias) for token, bias in value.items()}


#: Sampling parameters by their names in SamplingParams; `bad_words` is text here.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _integer,
    "min_tokens": _integer,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "seed": _integer,
    "stop": _texts,
    "stop_token_ids": _integers,
    "ignore_eos": _flag,
    "bad_words": _texts,
    "logit_bias": _bias,
    "logprobs": _integer,
}
#: The others, by their names in GenerationRequest.
REQUEST_FIELDS: dict[str, Callable[[Any], Any]] = {
    "prompt": _text,
    "token_ids": _integers,
    "messages": lambda value: value,  # the chat template looks at them
    "priority": _integer,
    "deadline": _number,
}


@dataclass(frozen=True)
class Line:
    """id: as the line has it, any JSON value; without one, the line's number."""

    where: str
    id: Any
    request: GenerationRequest


def read_lines(text: str, name: str, defaults: SamplingParams, tokenizer: Tokenizer) -> Iterator[Line]:
    """The requests of a file's text; empty lines are skipped. Raises InvalidArgument that names the line.

    defaults: for what a line does not say.
    """
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut a string at U+2028 too
        if line.strip():
            where = f"{name}:{number}"
            try:
                raw = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise InvalidArgument(f"{where}: not JSON: {e}") from e
            if not isinstance(raw, dict):
                raise InvalidArgument(f'{where}: must be a JSON object, e.g. {{"prompt": "Hello"}}')
            yield Line(where, _id(raw.pop("id", number), where), _request(raw, where, defaults, tokenizer))


def _id(value: Any, where: str) -> Any:
    """As it is. Half a surrogate pair in it could not be written out again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"{where}: id: not valid Unicode: {e.reason}") from e
    return value


def _request(
    raw: dict[str, Any], where: str, defaults: SamplingParams, tokenizer: Tokenizer
) -> GenerationRequest:
    values: dict[str, Any] = {}
    for name, value in raw.items():
        convert = FIELDS.get(name) or REQUEST_FIELDS.get(name)
        if convert is None:
            near = difflib.get_close_matches(name, [*FIELDS, *REQUEST_FIELDS], 1)
            raise InvalidArgument(
                f"{where}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if value is None:  # as if it were not there
            continue
        try:
            values[name] = convert(value)
        except (TypeError, ValueError) as e:
            raise InvalidArgument(f"{where}: {name}: {e}") from e
    if "bad_words" in values:
        values["bad_words"] = bad_words(values["bad_words"], tokenizer)
    params = replace(defaults, **{k: v for k, v in values.items() if k in FIELDS})
    return GenerationRequest(where, params=params, **{k: v for k, v in values.items() if k in REQUEST_FIELDS})


def bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of words: at the start of a text, and after a space, where they are other tokens
    mostly.
    """
    forms = dict.fromkeys(form for word in words if word for form in (word, " " + word.lstrip(" ")))
    sequences = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
    return tuple(s for s in dict.fromkeys(sequences) if s)


def output_line(id: Any, output: RequestOutput) -> str:
    """`logprobs` only if they were asked for."""
    assert output.finish_reason is not None
    line: Mapping[str, Any] = {
        "id": id,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        **({"logprobs": [asdict(p) for p in output.logprobs]} if output.logprobs else {}),
    }
    return json.dumps(line, ensure_ascii=False)
