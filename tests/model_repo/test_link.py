"""What goes over the socket comes out as it went in."""

import socket

from trtforge.model_repo.parse import Ask
from trtforge.model_repo.wire import (
    code_word,
    pack_ask,
    pack_output,
    read_frames,
    send_frame,
    unpack_ask,
    unpack_output,
)
from trtforge.plugins.errors import Overloaded
from trtforge.runtime.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

PARAMS = SamplingParams(
    max_tokens=3,
    seed=2**64 - 1,
    stop=("é\n", "🙂"),
    stop_token_ids=(1, 2),
    bad_words=((1,), (2, 3)),
    logit_bias={5: -1.5},
    logprobs=0,
)
TURNS = [{"role": "user", "content": "\ud800 half a character"}]
ASKS = [
    Ask(
        GenerationRequest("", prompt="x", params=PARAMS, deadline=0.5, cache_salt="s"), stream=True, end_id=-1
    ),
    Ask(
        GenerationRequest("", messages=TURNS),
        bad_words=("a",),
        bias_words=(("b", 1.0),),
        stop_sequences=((1, 2),),
    ),
]


def through(message: object) -> object:
    here, there = socket.socketpair()
    with here, there:
        send_frame(here, message)
        here.shutdown(socket.SHUT_WR)
        (received,) = read_frames(there)
    return received


def test_requests() -> None:
    for ask in ASKS:
        assert unpack_ask(through(pack_ask(ask))) == ask  # type: ignore[arg-type]


def test_outputs() -> None:
    output = RequestOutput(
        "1.0",
        "té🙂",
        (1, 2),
        (TokenLogprobs(-0.5),),
        FinishReason.STOP,
        "é",
        None,
        3,
        2,
        1,
        4,
        {"arrival_ns": 2**60},
    )
    assert unpack_output(through(pack_output(output))) == output  # type: ignore[arg-type]


def test_errors_keep_code_word_and_message() -> None:
    sent = RequestOutput("1.0", "", (), finish_reason=FinishReason.ERROR, error=Overloaded("full", 250))
    error = unpack_output(through(pack_output(sent))).error  # type: ignore[arg-type]
    assert error.wire_message() == "[OVERLOADED] retry_after_ms=250 full"  # type: ignore[union-attr]
    assert code_word(error) == "OVERLOADED"  # type: ignore[arg-type]


def test_a_frame_that_is_cut_short_is_none() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\x10\x00\x00\x00{")
        here.shutdown(socket.SHUT_WR)
        assert list(read_frames(there)) == []
