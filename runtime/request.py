"""The nouns that the runtime shares: what is asked (SamplingParams, GenerationRequest), what is in flight
(Request), what one step computes (Rows, Step), and what comes out (RequestOutput). No numpy here.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from trtforge.plugins.errors import InvalidArgument

#: The most alternatives that a request may ask for at each position.
MAX_LOGPROBS = 100

#: Below this temperature the best token is certain to FP32 anyway; clients send 1e-6 for greedy.
GREEDY_TEMPERATURE = 1e-5

NO_TIMINGS: Mapping[str, int] = MappingProxyType({})

#: Of a logit: far above any, and its sum with one still a finite FP32.
MAX_BIAS = 1e30


class FinishReason(str, Enum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens or max_seq_len
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    Order: penalties, temperature, top-k, top-p, min-p (Hugging Face's). The default is greedy: temperature 0.
    `top_k` 0, `top_p` 1 and `min_p` 0 mean off. What ends a request (an end token, a stop string) is not part
    of its output; nothing ends it before `min_tokens`.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a random one
    stop: tuple[str, ...] = ()  # matched on decoded text, excluded from the output
    stop_token_ids: tuple[int, ...] | None = None  # None: the model's own end tokens; (): none
    ignore_eos: bool = False  # the model's own end tokens do not end it
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: off; 0: of the chosen token; n: and of the n best

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, and none is drawn."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @cached_property
    def keeps_scores(self) -> bool:
        """Whether a request's past and its biases change no score."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return not (penalties or self.logit_bias or self.bad_words)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the best of the raw logits is taken, once there are min_tokens."""
        return self.is_greedy and self.keeps_scores

    def check(self, vocab_size: int) -> None:
        """Raises InvalidArgument for the first value that is out of its range."""
        self._within("max_tokens", 1, 2**31 - 1)
        self._within("min_tokens", 0, self.max_tokens)
        self._within("temperature", 0, 1e6)
        self._within("top_k", 0, 2**31 - 1)
        self._within("top_p", 1e-9, 1)
        self._within("min_p", 0, 1)
        self._within("repetition_penalty", 1e-6, 1e6)
        self._within("presence_penalty", -1e6, 1e6)
        self._within("frequency_penalty", -1e6, 1e6)
        if self.logprobs is not None:
            self._within("logprobs", 0, MAX_LOGPROBS)
        if not all(self.stop):
            raise InvalidArgument("stop: an empty string would end every text at once")
        if not all(self.bad_words):
            raise InvalidArgument("bad_words: an empty sequence")
        for name, ids in (("bad_words", chain(*self.bad_words)), ("logit_bias", self.logit_bias)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidArgument(f"{name}: token {token} is not in the vocabulary of {vocab_size}")
        for bias in self.logit_bias.values():
            if not abs(bias) <= MAX_BIAS:  # false for NaN too
                raise InvalidArgument(f"logit_bias: must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, got {bias}")

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:  # false for NaN too
            raise InvalidArgument(f"{name} must be from {low:g} to {high:g}, got {value}")


@dataclass(frozen=True)
class GenerationRequest:
    """What a caller asks. Exactly one of prompt, token_ids and messages is given.

    prompt: encoded by the tokenizer's own rule for special tokens. token_ids: taken as they are. messages:
    chat turns [{"role", "content"}], rendered with the model's own template, which brings its own BOS.
    priority: larger goes first, and is preempted last. deadline: seconds from submission after which the
    request is ended with DeadlineExceeded.
    """

    id: str
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = SamplingParams()
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one output position, of the distribution before temperature and cuts."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(NamedTuple):
    """What a sampler chose for one row of logits; with `error` set, nothing, and the request has failed.

    There is one for each row of each step, and a NamedTuple is made in a third of a frozen dataclass's time.
    """

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Request:
    """A request in flight: it has computed some of its tokens, a step computes some more.

    `num_computed` tokens have their K and V in the blocks of `block_tables` (one table per KV group): lists
    that only grow; what gives blocks back makes new ones. The token that was sampled last is always still to
    be computed.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, cut to the room that max_seq_len leaves
    end_ids: frozenset[int] = frozenset()  # tokens that end it
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # on time.monotonic's clock
    cache_salt: str = ""
    order: int = 0  # of arrival; the scheduler counts
    first_scheduled_ns: int = 0  # on the monotonic clock; 0: not yet in a step
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # if asked for, one for each of output_ids
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def seniority(self) -> tuple[int, int]:
        """Smaller goes first and is preempted last."""
        return (-self.priority, self.order)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.output_ids[: stop - prompt]


class Rows(NamedTuple):
    """A request's share of a step: its tokens [start, start + count), and for how many of the last of them
    logits are wanted (0 in mid-prefill, 1 usually, more for a verified draft). A NamedTuple as Sampled is one.
    """

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls here
    num_logits: int


@dataclass(frozen=True)
class Step:
    """What the scheduler plans and an executor runs, all rows back to back."""

    rows: tuple[Rows, ...]

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


class RequestOutput(NamedTuple):
    """What one step added to one request; the concatenation over a request is its whole answer.

    text: the delta, never half a character and never part of a stop string. token_ids: the tokens, without
    those that ended it (the tokens of a stop string are in). The last output of a request has
    `finish_reason`; if that is ERROR, `error` has the exception.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # if asked for, one for each of token_ids
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    error: Exception | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_kv_blocks: int = 0  # blocks of all KV groups that hold its tokens
    # Of the last output only, on the monotonic clock: arrival_ns, first_scheduled_ns, first_token_ns,
    # last_token_ns.
    timings: Mapping[str, int] = NO_TIMINGS

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
