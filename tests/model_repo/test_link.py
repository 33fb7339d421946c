"""What goes over the socket comes out as it went in."""

import queue
import socket
import threading
from pathlib import Path

import pytest

from trtforge.model_repo import link
from trtforge.model_repo.link import Server, SocketPort, address
from trtforge.model_repo.parse import Ask
from trtforge.model_repo.port import LocalPort, Unavailable
from trtforge.model_repo.wire import (
    RemoteError,
    code_word,
    pack_ask,
    pack_output,
    read_frames,
    send_frame,
    unpack_ask,
    unpack_output,
)
from trtforge.plugins.errors import Overloaded
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.null import write_null_engine
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
        client_id="ä",
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


def test_a_request_that_cannot_be_sent_fails_and_the_next_is_served(tmp_path: Path) -> None:
    write_null_engine(tmp_path)
    got: queue.Queue[RequestOutput] = queue.Queue()
    with Engine.open(tmp_path) as engine:
        server = Server(address("here"), lambda deliver, name: LocalPort(engine, deliver, name))
        port = SocketPort("here", lambda outputs: [got.put(o) for o in outputs])
        try:
            unspeakable = [{"role": "user", "content": object()}]
            port.submit("1.0", Ask(GenerationRequest("", messages=unspeakable)))
            failed = got.get(timeout=10)
            assert (failed.id, code_word(failed.error)) == ("1.0", "INTERNAL")  # type: ignore[arg-type]
            port.submit("2.0", Ask(GenerationRequest("", prompt="x", params=SamplingParams(max_tokens=3))))
            served = got.get(timeout=10)
            assert (served.id, len(served.token_ids), served.error) == ("2.0", 3, None)
        finally:
            port.close()
            server.close()


def test_a_call_that_is_refused_keeps_its_code_word(tmp_path: Path) -> None:
    write_null_engine(tmp_path)
    with Engine.open(tmp_path) as engine:
        server = Server(address("here"), lambda deliver, name: LocalPort(engine, deliver, name))
        port = SocketPort("here", lambda _: None)
        try:
            assert port.encode("hi", False) == [104, 105]
            with pytest.raises(
                RemoteError, match=r"\[INVALID_ARG\] the text has 100000 characters"
            ) as raised:
                port.encode("x" * 100_000, False)
            assert code_word(raised.value) == "INVALID_ARG"
        finally:
            port.close()
            server.close()


def test_an_engine_that_does_not_answer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CALL_SECONDS", 0.05)
    write_null_engine(tmp_path)
    with Engine.open(tmp_path) as engine:
        let_go = threading.Event()
        monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: let_go.wait() and [])
        server = Server(address("here"), lambda deliver, name: LocalPort(engine, deliver, name))
        port = SocketPort("here", lambda _: None)
        try:
            with pytest.raises(Unavailable, match="does not answer"):
                port.encode("hi", False)
        finally:
            let_go.set()
            port.close()
            server.close()


def test_only_one_in_a_while_waits_for_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred requests to an unloaded engine took ten seconds, one after the other."""
    monkeypatch.setattr(link, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(link, "LEAST_PATIENCE_SECONDS", 1.0)
    port = SocketPort("nowhere", lambda _: None)
    waits: list[float] = []
    monkeypatch.setattr(port._connected, "wait", lambda seconds: waits.append(seconds))
    try:
        for _ in range(4):
            with pytest.raises(Unavailable, match="is not loaded"):
                port.encode("hi", False)
    finally:
        port.close()
    assert waits == [1.0, 0.0, 0.0, 0.0]


def test_a_frame_that_is_cut_short_is_none() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\x10\x00\x00\x00{")
        here.shutdown(socket.SHUT_WR)
        assert list(read_frames(there)) == []
