"""The way from a Triton model to the engine: `LocalPort` in the engine's own process; `link.SocketPort` from the
text models' processes speaks to a LocalPort at the other end.

A port never raises for a request: what goes wrong comes back as that request's last output, like everything else.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from trtforge.model_repo.parse import Ask
from trtforge.plugins.errors import EngineFailure, ForgeError, InvalidArgument
from trtforge.runtime.request import FinishReason, GenerationRequest, RequestOutput
from trtforge.runtime.stream import merge

if TYPE_CHECKING:  # the text models' processes hold no engine
    from trtforge.runtime.engine import Engine

log = logging.getLogger(__name__)

#: Gets what one step added to all requests of a port, in one call, from a thread that must not be kept waiting.
Deliver = Callable[[Sequence[RequestOutput]], None]


class Unavailable(ForgeError):
    """The engine model is not loaded (yet)."""

    code_word = "UNAVAILABLE"


@dataclass(frozen=True)
class EngineFacts:
    """What a model needs to know of the engine. end_id, pad_id: -1 if it has none."""

    tokens_per_block: int
    vocab_size: int
    end_id: int
    pad_id: int


class Port(Protocol):
    """Ids are the caller's, unique within the port; a client's id is any."""

    def submit(self, id: str, ask: Ask) -> None: ...

    def cancel(self, id: str) -> None:
        """The client is gone."""

    def stop(self, client_id: str) -> None:
        """The client wants what there is of its requests to this engine, through whichever port they came."""

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        """Raises ForgeError if the engine cannot be reached."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def facts(self) -> EngineFacts: ...

    def close(self) -> None: ...


class LocalPort:
    """A port in the engine's process. `name` makes its ids unique among the engine's ports.

    A request that does not stream is gathered here, so that it costs one delivery and not one for each step.
    on_end gets every last output that the engine gives. clients: the engine's request id -> the client's, of what is
    in flight; one for all ports of an engine.
    """

    def __init__(
        self,
        engine: "Engine",
        deliver: Deliver,
        name: str,
        on_end: Callable[[RequestOutput], None] = lambda _: None,
        clients: dict[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_end = on_end
        self._clients = {} if clients is None else clients
        self._prefix = name + "/"
        self._running: dict[str, list[RequestOutput] | None] = {}  # None: streams

    def submit(self, id: str, ask: Ask) -> None:
        self._running[id] = None if ask.stream else []
        self._clients[self._prefix + id] = ask.client_id
        try:
            request = replace(resolve(self._engine, ask), id=self._prefix + id)
            self._engine.submit(request, sink=self._sink)
        except ForgeError as e:
            self._refuse(id, e)
        except Exception as e:  # ours, not the client's: it must get an answer all the same
            log.exception("submitting %s", id)
            self._refuse(id, EngineFailure(f"{type(e).__name__}: {e}"))

    def cancel(self, id: str) -> None:
        self._engine.cancel(self._prefix + id)

    def stop(self, client_id: str) -> None:
        for id, owner in list(self._clients.items()):
            if owner == client_id:
                self._engine.stop(id)

    def encode(self, text: str, special_tokens: bool) -> list[int]:
        engine = self._engine
        return engine.tokenizer.encode(
            text, add_special_tokens=special_tokens, max_tokens=engine.limits.max_seq_len
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(ids)

    def facts(self) -> EngineFacts:
        m = self._engine.manifest
        end_id = m.eos_token_ids[0] if m.eos_token_ids else -1
        return EngineFacts(
            m.kv.tokens_per_block,
            m.vocab_size,
            end_id,
            m.pad_token_id if m.pad_token_id is not None else end_id,
        )

    def close(self) -> None:
        """Whoever spoke through this port is gone: cancel what it asked for. The engine outlives its ports."""
        for id in list(self._running):
            self.cancel(id)

    def _refuse(self, id: str, error: ForgeError) -> None:
        self._running.pop(id, None)
        self._clients.pop(self._prefix + id, None)
        self._deliver([failed(id, error)])

    def _sink(self, outputs: Sequence[RequestOutput]) -> None:
        """On the engine's thread, once a step."""
        ready = []
        for output in outputs:
            if output.finished:
                self._clients.pop(output.id, None)
                self._on_end(output)
            id = output.id.removeprefix(self._prefix)
            gathered = self._running.pop(id, None) if output.finished else self._running.get(id)
            if gathered is None:
                ready.append(output._replace(id=id))
            else:
                gathered.append(output)
                if output.finished:
                    ready.append(merge(gathered)._replace(id=id))
        if ready:
            self._deliver(ready)


def resolve(engine: "Engine", ask: Ask) -> GenerationRequest:
    """What needs the tokenizer or the vocabulary: words to token ids, end ids out of range to none."""
    params, vocab = ask.request.params, engine.manifest.vocab_size
    encode = partial(engine.tokenizer.encode, add_special_tokens=False, max_tokens=engine.limits.max_seq_len)
    bias: dict[int, float] = {}
    if ask.bias:
        if len(ask.bias) < vocab:
            raise InvalidArgument(f"embedding_bias has {len(ask.bias)} values, the vocabulary {vocab}")
        bias = {i: b for i, b in enumerate(ask.bias[:vocab]) if b}
    for word, weight in ask.bias_words:
        for token in encode(word):
            bias[token] = bias.get(token, 0.0) + weight
    # A word appears in text mostly with a space before it, which is another token.
    variants = [v for w in ask.bad_words for v in dict.fromkeys((w, " " + w.lstrip(" ")))]
    bad_words = tuple(tuple(encode(v)) for v in variants)
    stop_ids, stop = stop_conditions(engine, ask)
    params = replace(
        params,
        logit_bias=bias,
        bad_words=params.bad_words + tuple(w for w in bad_words if w),
        stop_token_ids=stop_ids,
        stop=stop,
    )
    return replace(ask.request, params=params)


def stop_conditions(engine: "Engine", ask: Ask) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """(end tokens or None for the model's own, stop texts). A stop sequence of one token is an end token; a longer
    one is matched as text, which also finds it where it was tokenized otherwise."""
    params = ask.request.params
    ends: tuple[int, ...] | None = None
    if ask.end_id is not None:
        ends = (ask.end_id,) if 0 <= ask.end_id < engine.manifest.vocab_size else ()
    for token in chain(*ask.stop_sequences):
        if not 0 <= token < engine.manifest.vocab_size:
            raise InvalidArgument(
                f"stop_words_list: token {token} is not in the vocabulary of {engine.manifest.vocab_size}"
            )
    single = tuple(s[0] for s in ask.stop_sequences if len(s) == 1)
    if single:
        ends = (engine.manifest.eos_token_ids if ends is None else ends) + single
    texts = (engine.tokenizer.decode(s) for s in ask.stop_sequences if len(s) > 1)
    return ends, params.stop + tuple(t for t in texts if t)


def failed(id: str, error: Exception) -> RequestOutput:
    return RequestOutput(id, "", (), finish_reason=FinishReason.ERROR, error=error)
