"""`trtforge client` and its `send` against a real Triton on the toy engine."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from trtforge.model_repo import http_api
from trtforge.model_repo.client import Prompt, send
from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.plugins.errors import ForgeError, InvalidArgument
from trtforge.runtime.executors.null import NullBehaviour, write_null_engine
from trtforge.runtime.manifest import Limits

COMMAND = [str(Path(sys.executable).with_name("trtforge")), "client"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One engine under two sets of names: as streams, and `once_` for one response a request."""
    root = tmp_path_factory.mktemp("client")
    limits = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=256)
    write_null_engine(root / "engine", limits, behaviour=NullBehaviour(delay=0.002))
    package(root / "engine", root / "repository")
    package(root / "engine", root / "repository", prefix="once", decoupled=False)
    with TritonServer(root / "repository") as running:
        yield running


def urls(server: TritonServer) -> dict[str, str]:
    return {"grpc": f"grpc://{server.grpc_url}", "bare": server.grpc_url, "http": server.http_url}


@pytest.mark.slow
def test_all_ways_give_the_same_text(server: TritonServer) -> None:
    prompt = Prompt("To be, or not to be", max_tokens=40)
    whole = "".join(send(server.http_url, Prompt(prompt.text, 40, stream=False)))
    assert len(whole) > 20
    for url in urls(server).values():
        pieces = list(send(url, prompt))
        assert "".join(pieces) == whole
        assert len(pieces) > 20, "one piece for each step"
        assert list(send(url, Prompt(prompt.text, 40, stream=False))) == [whole]
        assert list(send(url, prompt, "once_ensemble")) == [whole], "not decoupled: one response"


@pytest.mark.slow
def test_options_reach_the_engine(server: TritonServer) -> None:
    for url in urls(server).values():
        greedy = "".join(send(url, Prompt("Hi", 30)))
        chat = "".join(send(url, Prompt("Hi", 30, chat=True)))
        assert chat != greedy, "the chat template changes the prompt"
        sampled = [
            "".join(send(url, Prompt("Hi", 30, options={"temperature": 1.0, "top_k": 4, "seed": seed})))
            for seed in (1, 1, 2)
        ]
        assert sampled[0] == sampled[1] != sampled[2]
        stopped = "".join(send(url, Prompt("Hi", 30, options={"stop_words": [greedy[10:13]]})))
        assert stopped == greedy[: greedy.index(greedy[10:13])]


@pytest.mark.slow
def test_errors_are_the_servers_own_words(server: TritonServer) -> None:
    for url in urls(server).values():
        for stream in (True, False):
            with pytest.raises(ForgeError, match=r"^\[INVALID_ARG\].*max_tokens"):
                list(send(url, Prompt("Hi", -1, stream=stream)))
        with pytest.raises(ForgeError, match="no_such_model"):
            list(send(url, Prompt("Hi", 1), "no_such_model"))


@pytest.mark.slow
def test_a_reader_that_leaves_cancels(server: TritonServer) -> None:
    def cancelled() -> float:
        with http_api.open_url(server.metrics_url, timeout=10) as response:
            text = response.read().decode()
        counts = re.findall(r'trtforge_requests_total\{.*outcome="cancelled".*\} (\S+)', text)
        assert counts
        return sum(map(float, counts))

    for url in urls(server).values():
        before = cancelled()
        pieces = send(url, Prompt("Hi", 240))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10
        while cancelled() == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_command(server: TritonServer) -> None:
    expected = "".join(send(server.grpc_url, Prompt("Hello", 12)))
    arguments = [*COMMAND, "--url", f"grpc://{server.grpc_url}", "--max-tokens", "12"]
    for more, given in ((["--prompt", "Hello"], None), (["--no-stream"], "Hello")):
        outcome = subprocess.run([*arguments, *more], input=given, capture_output=True, encoding="utf-8")
        assert (outcome.returncode, outcome.stderr) == (0, "")
        assert outcome.stdout == expected + "\n"
    sampled = [
        subprocess.run(
            [*arguments, "--prompt=Hello", "--temperature=2", f"--seed={seed}"],
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2], "for the server a temperature alone would be greedy"
    outcome = subprocess.run([*arguments, "--prompt=x", "--top-p=7"], capture_output=True, encoding="utf-8")
    assert outcome.returncode == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: [INVALID_ARG] ") and "top_p" in line


def test_nobody_there() -> None:
    for url in ("grpc://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1"):
        outcome = subprocess.run(
            [*COMMAND, "--url", url, "--prompt", "x"], capture_output=True, text=True, timeout=60
        )
        assert outcome.returncode == 1
        (line,) = outcome.stderr.splitlines()
        assert line.startswith("error: nothing answers at ") and "trtforge serve" in line


def test_a_port_of_something_else() -> None:
    """The metrics port answers every path with its page; so does many a web server."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# HELP")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with pytest.raises(ForgeError, match=f"^http://{address}: not Triton's HTTP port"):
            list(send(f"http://{address}", Prompt("x")))
        with pytest.raises(ForgeError, match=f"^nothing answers at grpc://{address}"):
            list(send(address, Prompt("x")))
        server.shutdown()


def test_unknown_scheme() -> None:
    with pytest.raises(InvalidArgument, match="give grpc://host:port or http://host:port"):
        send("ftp://127.0.0.1", Prompt("x"))
