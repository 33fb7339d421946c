"""What goes over the socket between the models' processes: frames of JSON, each with its length before it."""

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from trtforge.model_repo.parse import Ask
from trtforge.plugins.errors import EngineFailure, ForgeError
from trtforge.runtime.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

HEADER = struct.Struct("<I")
COUNTS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_kv_blocks")


class RemoteError(ForgeError):
    """An error that the engine's process put into words."""

    def __init__(self, code_word: str, wire: str) -> None:
        super().__init__(wire)
        self.remote_code_word = code_word
        self.wire = wire

    def wire_message(self) -> str:
        return self.wire


def code_word(error: ForgeError) -> str:
    return error.remote_code_word if isinstance(error, RemoteError) else error.code_word


def send_frame(connection: socket.socket, message: Any) -> None:
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    connection.sendall(HEADER.pack(len(body)) + body)


def read_frames(connection: socket.socket) -> Iterator[Any]:
    """Yield messages until the other end closes."""
    with connection.makefile("rb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            (length,) = HEADER.unpack(header)
            body = stream.read(length)
            if len(body) < length:
                return
            yield json.loads(body.decode("utf-8", "surrogatepass"))


def pack_output(o: RequestOutput) -> list[Any]:
    """A list, since there is one for each token. Alternatives to the chosen token are not passed on."""
    error = None
    if o.error is not None:
        e = (
            o.error
            if isinstance(o.error, ForgeError)
            else EngineFailure(f"{type(o.error).__name__}: {o.error}")
        )
        error = [code_word(e), e.wire_message()]
    finish = o.finish_reason.value if o.finish_reason else None
    logprobs = [t.logprob for t in o.logprobs]
    counts = {f: getattr(o, f) for f in COUNTS}
    return [o.id, o.text, o.token_ids, logprobs, finish, o.stop_reason, error, counts, dict(o.timings)]


def unpack_output(packed: list[Any]) -> RequestOutput:
    id, text, token_ids, logprobs, finish, stop_reason, error, counts, timings = packed
    return RequestOutput(
        id,
        text,
        tuple(token_ids),
        tuple(TokenLogprobs(p) for p in logprobs),
        FinishReason(finish) if finish else None,
        stop_reason,
        RemoteError(*error) if error else None,
        timings=timings,
        **counts,
    )


def pack_ask(ask: Ask) -> dict[str, Any]:
    return asdict(ask)


def unpack_ask(packed: dict[str, Any]) -> Ask:
    request = packed["request"]
    params = request["params"]
    params["stop"] = tuple(params["stop"])
    params["bad_words"] = tuple(tuple(w) for w in params["bad_words"])
    params["logit_bias"] = {
        int(t): b for t, b in params["logit_bias"].items()
    }  # keys of JSON objects are text
    if params["stop_token_ids"] is not None:
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return Ask(
        request=GenerationRequest(**{**request, "params": SamplingParams(**params)}),
        stream=packed["stream"],
        end_id=packed["end_id"],
        bad_words=tuple(packed["bad_words"]),
        bias_words=tuple((w, b) for w, b in packed["bias_words"]),
        stop_sequences=tuple(tuple(s) for s in packed["stop_sequences"]),
        bias=tuple(packed["bias"]),
        client_id=packed["client_id"],
    )
