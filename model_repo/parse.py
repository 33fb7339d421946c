"""A Triton request's tensors and parameters -> what is asked of the engine. Pure: numpy in, dataclasses out, so that
every rule of the protocol is tested without a server.

Raises InvalidArgument with the client's own name for the thing.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.model_repo.tensors import (
    ELSEWHERE,
    INPUTS,
    PARAMETERS_IGNORED,
    UNSUPPORTED,
    Input,
    Kind,
    Use,
    inputs_by_name,
    options_of,
)
from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.request import GenerationRequest, SamplingParams

#: At or below this, temperature means greedy (a client sends 1e-6 for it).
GREEDY_TEMPERATURE = 1e-5

#: Each word is looked for in every step, while all other requests wait.
MAX_WORDS = 1024

#: Levels of lists and objects in `messages`. Tool schemas have some ten; what follows recurses over them.
MAX_MESSAGE_DEPTH = 64


@dataclass(frozen=True)
class Ask:
    """One sequence asked of the engine. What needs the tokenizer or the vocabulary is left to the engine's side.

    client_id: Triton's request id, which the client chose; "" is none, and several requests may have the same.
    end_id: the client's, or None. bad_words, bias_words: texts. stop_sequences: token ids, each sequence ends the
    answer. bias: a dense embedding bias, FP32 [n] as a list; empty is none.
    """

    request: GenerationRequest
    stream: bool = False
    end_id: int | None = None
    bad_words: tuple[str, ...] = ()
    bias_words: tuple[tuple[str, float], ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    bias: tuple[float, ...] = ()
    client_id: str = ""


@dataclass(frozen=True)
class Wants:
    """What one sequence's responses hold. echo: the prompt to put first, as text or as ids."""

    stream: bool = False
    log_probs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    perf_metrics: bool = False
    echo: str | tuple[int, ...] | None = None
    batch_index: int | None = None


def read(
    kind: Kind,
    tensors: Mapping[str, NDArray[Any]],
    parameters: Mapping[str, Any],
    *,
    decoupled: bool = True,
    echo: bool = False,
    deadline_ms: int | None = None,
) -> list[tuple[Ask, Wants]]:
    """One entry for each row of the batch. tensors: by input name, [B, ...] each, STRING as objects of bytes.

    echo, deadline_ms: the model's own defaults, from its config.pbtxt.
    """
    shared = read_parameters(kind, parameters)
    declared = inputs_by_name(kind)
    size = batch_size(tensors)
    if size > 1 and not decoupled:
        raise InvalidArgument(
            f"batch size {size}: a repository that is not decoupled takes one prompt a request"
        )
    rows = []
    for row in range(size):
        options = row_options(declared, tensors, row, shared)
        refuse_unsupported(kind, options)
        defaults = {"exclude_input_in_output": not echo, "deadline_ms": deadline_ms}
        options = {**{k: v for k, v in defaults.items() if v is not None}, **options}
        ask, wants = read_row(kind, options, row if size > 1 else None)
        if ask.stream and not decoupled:
            name = next(i.name for i in declared.values() if i.key == "stream")
            raise InvalidArgument(
                f"{name} is true, but this repository was packaged with --decoupled-mode false"
            )
        rows.append((ask, wants))
    return rows


def batch_size(tensors: Mapping[str, NDArray[Any]]) -> int:
    sizes = {n: len(np.atleast_1d(t)) for n, t in tensors.items()}
    if not sizes:
        return 1
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise InvalidArgument(f"{name} has batch size {size}, {first} has {sizes[first]}")
    return sizes[first]


def row_options(
    declared: Mapping[str, Input], tensors: Mapping[str, NDArray[Any]], row: int, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """The plain values of one row of the batch by their options' names, with the request's parameters."""
    options: dict[str, Any] = {}
    given = [(declared[n].key, value(declared[n], np.asarray(t)[row])) for n, t in tensors.items()]
    for key, meant in (*given, *shared.items()):
        if key in options and options[key] != meant:
            raise InvalidArgument(f"{key} is given twice, as {options[key]!r} and as {meant!r}")
        options[key] = meant
    return options


def value(declared: Input, row: NDArray[Any]) -> Any:
    """One batch row of a tensor as a plain Python value: a scalar for dims [1], else a list (of lists)."""
    if declared.dtype == "STRING":
        texts = [text(declared.name, v) for v in np.ravel(row)]
        return only(declared, texts) if declared.scalar else texts
    if declared.scalar:
        return only(declared, np.ravel(row).tolist())
    return row.tolist()


def only(declared: Input, values: list[Any]) -> Any:
    if len(values) != 1:
        raise InvalidArgument(f"{declared.name} must hold one value for each prompt, got {len(values)}")
    return values[0]


def text(name: str, raw: Any) -> str:
    try:
        return raw.decode() if isinstance(raw, bytes) else str(raw)
    except UnicodeDecodeError as e:
        raise InvalidArgument(f"{name} is not valid UTF-8 ({e.reason} at byte {e.start})") from e


def read_parameters(kind: Kind, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Request parameters are where Triton puts JSON keys that are no input of the model: honour, ignore or refuse."""
    known = options_of(kind)
    options: dict[str, Any] = {}
    for name, given in parameters.items():
        if name in known:
            options[known[name].key] = coerce(known[name], given)
        elif name == "request_type" and str(given).lower().endswith("context_and_generation"):
            continue
        elif name.lower() in UNSUPPORTED:  # preprocessing has its names in capitals
            raise InvalidArgument(f"{name} is not supported: {UNSUPPORTED[name.lower()]}")
        elif name not in PARAMETERS_IGNORED and (meant := near_miss(kind, name)):
            raise InvalidArgument(f"unknown key {name!r}: did you mean {meant!r}?")
        elif asks_elsewhere(name, given):
            raise InvalidArgument(f"{name} is an input of another model, not of this one")
    return options


def near_miss(kind: Kind, name: str) -> str | None:
    """The input that an unknown key probably means, or None."""
    names = list(inputs_by_name(kind))
    if kind in (Kind.TEXT, Kind.BLS) and name in ELSEWHERE:
        return ELSEWHERE[name]
    same_option = [i.name for i in inputs_by_name(kind).values() if i.option == name]
    folded = {n.replace("_", "").lower(): n for n in (*names, *PARAMETERS_IGNORED)}
    close = difflib.get_close_matches(name.replace("_", "").lower(), folded, n=1, cutoff=0.8)
    return same_option[0] if same_option else folded[close[0]] if close else None


def asks_elsewhere(name: str, given: Any) -> bool:
    """Whether another of the models would do something about it."""
    declared = [i for inputs in INPUTS.values() for i in inputs if i.name == name]
    return any(i.use is not Use.IGNORE and given not in i.neutral for i in declared)


def coerce(declared: Input, given: Any) -> Any:
    """A parameter's JSON value as the input's type; parameters may come as text from gRPC clients."""
    kinds: dict[str, type] = {"INT32": int, "UINT64": int, "FP32": float, "BOOL": bool, "STRING": str}
    wanted = kinds[declared.dtype]
    if wanted is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if not isinstance(given, wanted) or (wanted is int and isinstance(given, bool)):
        raise InvalidArgument(f"{declared.name} must be {declared.dtype}, got {given!r}")
    return given


def refuse_unsupported(kind: Kind, options: Mapping[str, Any]) -> None:
    for declared in inputs_by_name(kind).values():
        given = options.get(declared.key)
        if declared.use is Use.REFUSE and given is not None and given not in declared.neutral:
            why = declared.meaning.partition("; ")  # what its absence means goes first
            raise InvalidArgument(f"{declared.name} {given!r} is not supported: {why[2] or why[0]}")


def read_row(kind: Kind, options: dict[str, Any], batch_index: int | None) -> tuple[Ask, Wants]:
    prompt = read_token_prompt(options) if kind is Kind.TOKENS else read_text_prompt(options)
    check_retention(options)
    stream = bool(options.get("stream"))
    deadline_ms = options.get("deadline_ms")
    if deadline_ms is not None and deadline_ms <= 0:
        raise InvalidArgument(f"deadline_ms must be > 0, got {deadline_ms}")
    request = GenerationRequest(
        id="",
        params=read_sampling(kind, options),
        deadline=deadline_ms / 1000 if deadline_ms is not None else None,
        cache_salt=options.get("cache_salt", ""),
        **prompt,
    )
    ask = Ask(
        request,
        stream,
        options.get("end_id"),
        words(options, "bad_words"),
        read_bias_words(options),
        word_list("stop_words_list", options.get("stop_words_list")),
        tuple(options.get("embedding_bias", ())),
    )
    wants = Wants(
        stream,
        bool(options.get("return_log_probs")),
        bool(options.get("return_num_input_tokens")),
        bool(options.get("return_num_output_tokens")),
        bool(options.get("return_perf_metrics")),
        read_echo(options, prompt, stream),
        batch_index,
    )
    return ask, wants


def read_text_prompt(options: Mapping[str, Any]) -> dict[str, Any]:
    prompt, messages = options.get("text_input"), options.get("messages")
    if messages and prompt:
        raise InvalidArgument("give text_input or messages, not both")
    if messages:
        return {"messages": read_messages(messages)}
    if prompt is None:
        raise InvalidArgument("text_input is missing: give the prompt in it, or chat turns in messages")
    return {"prompt": prompt}


def read_messages(raw: str) -> list[dict[str, Any]]:
    try:
        turns = json.loads(raw)
    except RecursionError as e:
        raise InvalidArgument(f"messages is nested more than {MAX_MESSAGE_DEPTH} levels deep") from e
    except ValueError as e:
        raise InvalidArgument(f"messages is not JSON ({e}); it holds a list of {{role, content}}") from e
    if depth(turns) > MAX_MESSAGE_DEPTH:
        raise InvalidArgument(f"messages is nested more than {MAX_MESSAGE_DEPTH} levels deep")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        raise InvalidArgument("messages must be a JSON list of at least one {role, content}")
    for i, turn in enumerate(turns):
        if not isinstance(turn.get("role"), str) or not ("content" in turn or turn.get("tool_calls")):
            raise InvalidArgument(f"messages[{i}] must have a role and a content")
    return turns


def depth(value: Any) -> int:
    """Levels of lists and objects of a JSON value, found without recursion."""
    level, levels = [value], 0
    while level := [v for v in level if isinstance(v, list | dict)]:
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
        levels += 1
    return levels


def read_token_prompt(options: Mapping[str, Any]) -> dict[str, Any]:
    ids = options.get("input_ids")
    if ids is None:
        raise InvalidArgument("input_ids is missing")
    length = options.get("input_lengths", len(ids))
    if not 0 < length <= len(ids):
        raise InvalidArgument(f"input_lengths must be from 1 to the {len(ids)} of input_ids, got {length}")
    return {"token_ids": ids[:length]}


def check_retention(options: Mapping[str, Any]) -> None:
    """The ranges of a prompt's KV blocks: one start, end and priority each, and one duration if any has one."""
    first, *others = (f"retention_token_range_{part}" for part in ("starts", "ends", "priorities"))
    if "retention_token_range_durations_ms" in options:
        others.append("retention_token_range_durations_ms")
    length = len(options.get(first, ()))
    for name in others:
        if len(options.get(name, ())) != length:
            raise InvalidArgument(
                f"{name} has {len(options.get(name, ()))} entries, {first} {length}; give one for each range"
            )


def read_sampling(kind: Kind, options: Mapping[str, Any]) -> SamplingParams:
    max_tokens = options.get("max_tokens")
    name = "request_output_len" if kind is Kind.TOKENS else "max_tokens"
    if max_tokens is None:
        raise InvalidArgument(f"{name} is missing: say how many new tokens are wanted")
    if max_tokens <= 0:
        raise InvalidArgument(f"{name} must be > 0, got {max_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=options.get("min_tokens", 0),
        **read_choice(kind, options),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        seed=options.get("seed"),
        stop=words(options, "stop_words"),
        ignore_eos=bool(options.get("ignore_eos")),
        bad_words=word_list("bad_words_list", options.get("bad_words_list")),
        logprobs=0 if options.get("return_log_probs") else None,
    )


def read_choice(kind: Kind, options: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top-k, top-p and min-p. Without any of the last three the old repository was greedy whatever the
    temperature; its clients send top_p 0.0 for "absent"."""
    top_k, top_p, min_p = options.get("top_k", 0), options.get("top_p", 0.0), options.get("min_p", 0.0)
    temperature = options.get("temperature", 1.0)
    prefix = "runtime_" if kind is Kind.TOKENS else ""
    if top_k < 0:
        raise InvalidArgument(f"{prefix}top_k must be >= 0, got {top_k}")
    if not top_p <= 1:
        raise InvalidArgument(f"{prefix}top_p must be at most 1, got {top_p}")
    if not 0 <= temperature < float("inf"):
        raise InvalidArgument(f"temperature must be >= 0 and finite, got {temperature}")
    if not 0 <= min_p <= 1:
        raise InvalidArgument(f"min_p must be from 0 to 1, got {min_p}")
    if temperature <= GREEDY_TEMPERATURE or (top_k == 0 and top_p <= 0 and min_p == 0) or top_k == 1:
        return {"temperature": 0.0}
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p if top_p > 0 else 1.0, "min_p": min_p}


def words(options: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """An empty word is none."""
    given = tuple(w for w in options.get(name, ()) if w)
    limit_words(name, given)
    return given


def limit_words(name: str, given: Sequence[Any]) -> None:
    if len(given) > MAX_WORDS:
        raise InvalidArgument(f"{name} has {len(given)} entries; there may be {MAX_WORDS}")


def read_bias_words(options: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    given, weights = options.get("embedding_bias_words", []), options.get("embedding_bias_weights", [])
    if len(given) != len(weights):
        raise InvalidArgument(
            f"embedding_bias_words has {len(given)} entries, embedding_bias_weights {len(weights)}; give one for each"
        )
    limit_words("embedding_bias_words", given)
    return tuple((w, float(b)) for w, b in zip(given, weights, strict=True) if w)


def read_echo(
    options: Mapping[str, Any], prompt: Mapping[str, Any], stream: bool
) -> str | tuple[int, ...] | None:
    if stream or options.get("exclude_input_in_output", True):
        return None
    if "messages" in prompt:
        raise InvalidArgument("exclude_input_in_output false is for text_input; messages are not repeated")
    echo: str | tuple[int, ...] = prompt["prompt"] if "prompt" in prompt else tuple(prompt["token_ids"])
    return echo


def word_list(name: str, rows: Any) -> tuple[tuple[int, ...], ...]:
    """[[ids of all words], [cumulative end offsets, then -1]] -> the words; [[], []] and [[0], [-1]] are none."""
    if rows is None or not rows[0]:
        return ()
    ids, offsets = rows
    ends = offsets[: offsets.index(-1)] if -1 in offsets else offsets
    if any(o != -1 for o in offsets[len(ends) :]):
        raise InvalidArgument(f"{name}: only -1 may follow the first -1 of the offsets, got {offsets}")
    limit_words(name, ends)
    starts = [0, *ends[:-1]]
    if any(not s < e <= len(ids) for s, e in zip(starts, ends, strict=False)):
        raise InvalidArgument(f"{name}: offsets must increase, from 1 to the {len(ids)} ids, got {offsets}")
    return tuple(tuple(ids[s:e]) for s, e in zip(starts, ends, strict=False))


def is_stop_request(tensors: Mapping[str, NDArray[Any]]) -> bool:
    return "stop" in tensors and bool(np.any(tensors["stop"]))
