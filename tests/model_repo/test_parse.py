"""How a Triton request is read: every rule of the protocol, without a server."""

import json
from typing import Any

import numpy as np
import pytest

from trtforge.model_repo.parse import MAX_WORDS, Ask, Wants, read, read_parameters, word_list
from trtforge.model_repo.tensors import Kind
from trtforge.plugins.errors import InvalidArgument


def texts(*values: bytes) -> Any:
    return np.array([list(values)], np.object_)


def one(
    kind: Kind = Kind.TEXT, parameters: dict[str, Any] | None = None, **tensors: Any
) -> tuple[Ask, Wants]:
    base: dict[str, Any] = {"text_input": texts(b"hi"), "max_tokens": np.array([[5]], np.int32)}
    if kind is Kind.TOKENS:
        base = {"input_ids": np.array([[7, 8, 9]], np.int32), "request_output_len": np.array([[5]], np.int32)}
    given = {k: v for k, v in {**base, **tensors}.items() if v is not None}
    (row,) = read(kind, given, parameters or {})
    return row


def scalar(value: Any, dtype: Any = np.float32) -> Any:
    return np.array([[value]], dtype)


def test_nothing_said_is_greedy_with_the_models_own_end() -> None:
    ask, wants = one()
    assert ask.request.prompt == "hi"
    assert ask.request.params.temperature == 0
    assert ask.request.params.seed is None
    assert ask.end_id is None
    assert wants == Wants()


@pytest.mark.parametrize(
    "tensors",
    [
        {"temperature": scalar(0.7)},  # without top-k and top-p the old repository was greedy
        {"temperature": scalar(0.0), "top_p": scalar(1.0)},  # vLLM's benchmark
        {"temperature": scalar(1e-6), "top_p": scalar(1.0)},  # SGLang's
        {"temperature": scalar(1.0), "top_k": scalar(1, np.int32), "top_p": scalar(0.0)},
        {"top_p": scalar(-1.0)},
    ],
)
def test_what_old_clients_call_greedy(tensors: dict[str, Any]) -> None:
    ask, _ = one(**tensors)
    assert ask.request.params.temperature == 0


def test_sampling() -> None:
    ask, _ = one(
        temperature=scalar(0.5), top_p=scalar(0.0), top_k=scalar(40, np.int32), seed=scalar(2**63, np.uint64)
    )
    p = ask.request.params
    assert (p.temperature, p.top_p, p.top_k, p.seed) == (0.5, 1.0, 40, 2**63)
    assert one(min_p=scalar(0.25))[0].request.params.min_p == 0.25
    assert one(top_p=scalar(1.0))[0].request.params.temperature == 1.0


def test_empty_words_are_none() -> None:
    ask, _ = one(stop_words=texts(b"", b"END"), bad_words=texts(b""))
    assert ask.request.params.stop == ("END",)
    assert ask.bad_words == ()


def test_token_level_names() -> None:
    ask, wants = one(
        Kind.TOKENS,
        {"Streaming": True},
        input_lengths=scalar(2, np.int32),
        beam_width=scalar(1, np.int32),
        runtime_top_k=scalar(3, np.int32),
        len_penalty=scalar(1.0),
        streaming=scalar(True, np.bool_),
        end_id=scalar(-1, np.int32),
        decoder_input_ids=np.array([[1]], np.int32),
        bad_words_list=np.array([[[5, 6, 7], [2, 3, -1]]], np.int32),
        stop_words_list=np.array([[[0], [-1]]], np.int32),
    )
    assert list(ask.request.token_ids or ()) == [7, 8]
    assert ask.stream and wants.stream
    assert ask.end_id == -1
    assert ask.request.params.top_k == 3
    assert ask.request.params.bad_words == ((5, 6), (7,))
    assert ask.stop_sequences == ()


def test_top_p_decay_has_no_effect_whatever_it_says() -> None:
    ask, _ = one(
        Kind.TOKENS,
        runtime_top_p=scalar(0.9),
        runtime_top_p_min=scalar(0.5),
        runtime_top_p_decay=scalar(0.7),
        runtime_top_p_reset_ids=scalar(3, np.int32),
    )
    assert ask.request.params.top_p == pytest.approx(0.9)


RANGES = {
    "retention_token_range_starts": np.array([[0, 8]], np.int32),
    "retention_token_range_ends": np.array([[8, -1]], np.int32),
    "retention_token_range_priorities": np.array([[90, 10]], np.int32),
    "retention_token_range_durations_ms": np.array([[500, -1]], np.int32),
}


def test_retention_ranges_are_of_one_length() -> None:
    """Nothing is done with them yet, but a list cut short is a client's mistake, which no server took."""
    one(Kind.TOKENS, **RANGES)
    one(Kind.TOKENS, **{**RANGES, "retention_token_range_durations_ms": None})  # no range expires
    one(Kind.TOKENS, **{name: np.zeros((1, 0), np.int32) for name in RANGES})
    for name, given in RANGES.items():
        with pytest.raises(InvalidArgument, match=r"has . entries, retention_token_range_starts .; give one"):
            one(Kind.TOKENS, **{**RANGES, name: given[:, :1]})
    with pytest.raises(InvalidArgument, match="retention_token_range_ends has 0 entries"):
        one(Kind.TOKENS, **{**RANGES, "retention_token_range_ends": None})


def test_scalars_without_the_second_dimension() -> None:
    """A config with `reshape: { shape: [ ] }` gives [B]."""
    ask, _ = one(Kind.TOKENS, request_output_len=np.array([4], np.int32))
    assert ask.request.params.max_tokens == 4


def test_word_lists() -> None:
    assert word_list("w", [[], []]) == ()
    assert word_list("w", [[1, 2, 3], [1, 3, -1]]) == ((1,), (2, 3))
    assert word_list("w", [[1] * MAX_WORDS, list(range(1, MAX_WORDS + 1))]) == ((1,),) * MAX_WORDS
    with pytest.raises(InvalidArgument, match="w has 1025 entries"):
        word_list("w", [[1] * 1025, list(range(1, 1026))])
    for offsets in ([2, 1, -1], [4, -1, -1], [-1, 2, -1], [0, -1, -1]):
        with pytest.raises(InvalidArgument, match="w: "):
            word_list("w", [[1, 2, 3], offsets])


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_words_are_bounded(name: str) -> None:
    """Each costs time in every step; with 100,000 of them everybody's tokens took ten times as long."""

    def ask(n: int) -> None:
        given = {name: texts(*[b"%d" % i for i in range(n)])}
        if name == "embedding_bias_words":
            given["embedding_bias_weights"] = np.ones((1, n), np.float32)
        one(**given)

    ask(MAX_WORDS)
    with pytest.raises(
        InvalidArgument, match=f"{name} has {MAX_WORDS + 1} entries; there may be {MAX_WORDS}"
    ):
        ask(MAX_WORDS + 1)


def test_a_batch_is_split() -> None:
    rows = read(
        Kind.TEXT,
        {"text_input": np.array([[b"a"], [b"b"]], np.object_), "max_tokens": np.array([[3], [4]], np.int32)},
        {},
    )
    assert [(a.request.prompt, a.request.params.max_tokens, w.batch_index) for a, w in rows] == [
        ("a", 3, 0),
        ("b", 4, 1),
    ]
    with pytest.raises(InvalidArgument, match="batch size 2"):
        read(
            Kind.TEXT,
            {
                "text_input": np.array([[b"a"], [b"b"]], np.object_),
                "max_tokens": np.array([[3], [4]], np.int32),
            },
            {},
            decoupled=False,
        )


def test_messages() -> None:
    turns = [{"role": "user", "content": "hé"}]
    ask, _ = one(text_input=None, messages=texts(json.dumps(turns).encode()))
    assert ask.request.messages == turns
    called = [*turns, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert one(text_input=None, messages=texts(json.dumps(called).encode()))[0].request.messages == called
    for bad in (b"{}", b"[]", b"no", b'[{"content": "x"}]'):
        with pytest.raises(InvalidArgument, match="messages"):
            one(text_input=None, messages=texts(bad))
    with pytest.raises(InvalidArgument, match="not both"):
        one(messages=texts(json.dumps(turns).encode()))


@pytest.mark.parametrize("levels", [65, 900, 100_000])
def test_messages_that_are_nested_too_deep(levels: int) -> None:
    """900 levels parse, and would break whatever recurses over them later."""
    nested = b"[" * (levels - 2) + b"]" * (levels - 2)
    with pytest.raises(InvalidArgument, match="messages is nested more than 64 levels deep"):
        one(text_input=None, messages=texts(b'[{"role": "user", "content": "x", "extra": %s}]' % nested))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": None}, "text_input is missing"),
        ({"text_input": texts(b"\xff")}, "text_input is not valid UTF-8"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": scalar(-1, np.int32)}, "max_tokens must be > 0, got -1"),
        ({"beam_width": scalar(2, np.int32)}, "beam_width 2 is not supported"),
        ({"num_return_sequences": scalar(3, np.int32)}, "num_return_sequences 3 is not supported"),
        ({"return_context_logits": scalar(True, np.bool_)}, "return_context_logits True is not supported"),
        ({"decoder_text_input": texts(b"x")}, "decoder_text_input 'x' is not supported"),
        ({"embedding_bias_words": texts(b"x")}, "embedding_bias_words has 1 entries"),
        ({"deadline_ms": scalar(0, np.int32)}, "deadline_ms must be > 0"),
        ({"temperature": scalar(-1.0)}, "temperature must be >= 0"),
        ({"temperature": scalar(float("nan"))}, "temperature must be >= 0"),
        ({"top_p": scalar(1.5)}, "top_p must be at most 1"),
        ({"top_k": scalar(-2, np.int32)}, "top_k must be >= 0"),
    ],
)
def test_what_is_refused(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        one(**tensors)


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        (Kind.TEXT, "max_token", "did you mean 'max_tokens'"),
        (Kind.TEXT, "temprature", "did you mean 'temperature'"),
        (Kind.TEXT, "Temperature", "did you mean 'temperature'"),
        (Kind.TEXT, "max_new_tokens", "did you mean 'max_tokens'"),
        (Kind.TEXT, "streaming", "did you mean 'stream'"),
        (Kind.TEXT, "n", "did you mean 'num_return_sequences'"),
        (Kind.TOKENS, "stream", "did you mean 'streaming'"),
        (Kind.TOKENS, "top_k", "did you mean 'runtime_top_k'"),
        (Kind.TEXT, "lora_task_id", "LoRA adapters are not done yet"),
        (Kind.TEXT, "guided_decoding_guide", "guided decoding is not done yet"),
        (Kind.TEXT, "request_type", "disaggregated"),
        (Kind.TEXT, "num_draft_tokens", "num_draft_tokens is an input of another model"),
        (Kind.TEXT, "input_lengths", "input_lengths is an input of another model"),
        (Kind.TOKENS, "text_input", "text_input is an input of another model"),
        (Kind.TEXT, "min_length", "min_length must be INT32"),
        (Kind.TEXT, "QUERY", "QUERY is an input of another model"),
    ],
)
def test_keys_that_are_no_input(kind: Kind, key: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        one(kind, {key: "1"})


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        (Kind.PREPROCESSING, "BAD_WORD_DICT", "did you mean 'BAD_WORDS_DICT'"),
        (Kind.PREPROCESSING, "request_output_len", "did you mean 'REQUEST_OUTPUT_LEN'"),
        (Kind.PREPROCESSING, "query", "did you mean 'QUERY'"),
        (Kind.PREPROCESSING, "text_input", "text_input is an input of another model"),
        (Kind.PREPROCESSING, "PROMPT_TABLE_EXTRA_ID", "prompt tuning is not done"),
        (Kind.POSTPROCESSING, "SEQUENCE_LENGTHS", "did you mean 'SEQUENCE_LENGTH'"),
        (Kind.POSTPROCESSING, "max_tokens", "max_tokens is an input of another model"),
    ],
)
def test_keys_that_are_no_input_of_the_tokenizers_models(kind: Kind, key: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_parameters(kind, {key: "1"})
    assert read_parameters(kind, {"id": "x", "user_tag": "blue", "binary_data_output": True}) == {}


def test_keys_that_are_honoured_or_ignored() -> None:
    ask, _ = one(
        parameters={"min_length": 3, "random_seed": 9, "ignore_eos": True, "min_p": 0, "cache_salt": "s"}
    )
    p = ask.request.params
    assert (p.min_tokens, p.seed, p.ignore_eos, p.min_p, ask.request.cache_salt) == (3, 9, True, 0.0, "s")
    one(parameters={"accumulate_tokens": True, "id": "x", "Streaming": False, "user_tag": "blue"})
    one(parameters={"num_draft_tokens": 0, "use_draft_logits": False, "early_stopping": True})
    one(parameters={"request_type": "context_and_generation"})
    with pytest.raises(InvalidArgument, match="min_tokens is given twice"):
        one(parameters={"min_length": 3}, min_tokens=scalar(2, np.int32))


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.BLS, Kind.TOKENS])
def test_older_names_of_inputs(kind: Kind) -> None:
    older = {"min_length": scalar(3, np.int32), "random_seed": scalar(9, np.uint64)}
    params = one(kind, **older)[0].request.params
    assert (params.min_tokens, params.seed) == (3, 9)
    with pytest.raises(InvalidArgument, match="seed is given twice, as 8 and as 9"):
        one(kind, seed=scalar(8, np.uint64), random_seed=older["random_seed"])


def test_echo() -> None:
    assert one(exclude_input_in_output=scalar(False, np.bool_))[1].echo == "hi"
    assert one(exclude_input_in_output=scalar(False, np.bool_), stream=scalar(True, np.bool_))[1].echo is None
    assert one(Kind.TOKENS, exclude_input_in_output=scalar(False, np.bool_))[1].echo == (7, 8, 9)
    given = {"text_input": texts(b"hi"), "max_tokens": scalar(1, np.int32)}
    assert read(Kind.TEXT, given, {}, echo=True)[0][1].echo == "hi"
    assert read(Kind.TEXT, given, {}, deadline_ms=50)[0][0].request.deadline == 0.05
