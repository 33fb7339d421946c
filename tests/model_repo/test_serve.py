"""`trtforge serve` with a real Triton: it comes up, it goes away, and nothing stays behind however it ends."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trtforge.model_repo import http_api, launch, serve
from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.plugins.errors import EngineFailure, EnvironmentProblem, RepositoryError
from trtforge.runtime.executors.null import NullBehaviour, write_null_engine
from trtforge.runtime.manifest import Limits

COMMAND = [str(Path(sys.executable).with_name("trtforge")), "serve"]
FREE_PORTS = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]

TOY_CONFIG = """
name: "toy"
backend: "python"
max_batch_size: 4
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [1] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [1] }
]
output [{ name: "text_output" data_type: TYPE_STRING dims: [-1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""
TOY_MODEL = """
import os, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        for request in requests:
            {execute}
            text = pb.Tensor("text_output", np.array([b"toy"], dtype=np.object_))
            request.get_response_sender().send(pb.InferenceResponse([text]), flags=1)
"""


def toy_repository(root: Path, *, initialize: str = "pass", execute: str = "pass") -> Path:
    """A repository with one text model that has nothing of trtforge; for what concerns the launcher alone."""
    version = root / "toy" / "1"
    version.mkdir(parents=True)
    (root / "toy" / "config.pbtxt").write_text(TOY_CONFIG)
    (version / "model.py").write_text(TOY_MODEL.format(initialize=initialize, execute=execute))
    return root


@pytest.fixture
def null_repository(tmp_path: Path) -> Path:
    """A repository around the toy engine, as `trtforge package` writes it."""
    write_null_engine(tmp_path / "engine", Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=128))
    package(tmp_path / "engine", tmp_path / "null")
    return tmp_path / "null"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `check` would refuse reaches Triton."""
    monkeypatch.setattr(serve, "require_sound", lambda repository: None)


def alive(pid: int) -> bool:
    return launch._start_time(pid) is not None


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def processes(text: str) -> list[int]:
    """Living processes with this text in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (entry / "cmdline").read_bytes() and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def regions(pid: int) -> list[str]:
    """Shared memory and run directories of the server that process `pid` started."""
    return [path.name for path in (*launch.SHM.iterdir(), *Path("/tmp").iterdir()) if f"-{pid}-" in path.name]


@contextlib.contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`trtforge serve ...` when it says that it is ready: the process and its HTTP URL."""
    command = [*COMMAND, *map(str, arguments), *FREE_PORTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("ready: HTTP http://127.0.0.1:"), line + process.stderr.read()
        yield process, line.split()[2]
    finally:
        process.kill()
        process.communicate()


# --- it comes up and goes away


@pytest.mark.slow
def test_command_serves_until_it_is_told_to_stop(null_repository: Path) -> None:
    with serving(null_repository) as (process, url):
        for model in ("ensemble", "tensorrt_llm_bls"):
            answer = http_api.call(f"{url}/v2/models/{model}/generate", {"text_input": "Hi", "max_tokens": 5})
            assert answer["text_output"]
        assert (
            len(processes(f"trtforge-{launch._pid_namespace()}-{process.pid}-")) >= 4
        )  # the server, three stubs
        assert regions(process.pid)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert output == "stopped\n"
        assert errors == ""
        assert processes(f"-{process.pid}-") == []
        assert regions(process.pid) == []
        with pytest.raises(OSError):
            http_api.call(f"{url}/v2/health/live", timeout=2)


@pytest.mark.slow
def test_a_failed_engine_ends_the_server(tmp_path: Path) -> None:
    limits = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=128)
    write_null_engine(tmp_path / "engine", limits, behaviour=NullBehaviour(lost_at=20))
    package(tmp_path / "engine", tmp_path / "null")
    with serving(tmp_path / "null") as (process, url):
        with pytest.raises(urllib.error.HTTPError):
            http_api.call(f"{url}/v2/models/ensemble/generate", {"text_input": "Hi", "max_tokens": 50})
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert errors.splitlines()[-1].startswith("error: the engine has failed (")
        assert "told to be lost" in errors
        assert processes(f"-{process.pid}-") == []


@contextlib.contextmanager
def toy_served_by_a_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    code = (
        "import sys; from trtforge.model_repo import serve; serve.require_sound = lambda repository: None\n"
        "with serve.TritonServer(sys.argv[1]) as server: print('up', flush=True); server.watch()"
    )
    command = [sys.executable, "-c", code, str(toy_repository(root))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in processes(f"-{process.pid}-"):  # none, unless the test fails
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_kill_9_takes_everything_along(tmp_path: Path) -> None:
    with toy_served_by_a_process(tmp_path / "repository") as parent:
        children = processes(f"-{parent.pid}-")
        assert len(children) == 3  # the guard, the server and its stub
        assert regions(parent.pid)
        parent.kill()
        wait_until(lambda: not any(map(alive, children)))
        wait_until(lambda: regions(parent.pid) == [])


@pytest.mark.slow
def test_sweep_after_parent_and_guard_were_killed(tmp_path: Path) -> None:
    with toy_served_by_a_process(tmp_path / "repository") as parent:
        children = processes(f"-{parent.pid}-")
        (guard,) = processes("guard.py\0trtforge-" + f"{launch._pid_namespace()}-{parent.pid}-")
        parent.kill()
        parent.wait()
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: sum(map(alive, children)) <= 1)  # the stub may wait for a lock for ever
        assert regions(parent.pid)
        launch.sweep()
        wait_until(lambda: not any(map(alive, children)))
        assert regions(parent.pid) == []


def test_sweep_leaves_the_living_alone() -> None:
    mine = launch.SHM / f"{launch.run_name()}test"
    elsewhere = launch.SHM / f"trtforge-1-{2**22}-1-0-test"  # of a process in another pid namespace
    dead = (
        launch.SHM / f"trtforge-{launch._pid_namespace()}-{os.getpid()}-1-0-test"
    )  # our pid, an earlier process
    try:
        for path in (mine, elsewhere, dead):
            path.touch()
        launch.sweep()
        assert mine.exists() and elsewhere.exists() and not dead.exists()
    finally:
        for path in (mine, elsewhere, dead):
            path.unlink(missing_ok=True)


@pytest.mark.slow
def test_stop_during_loading(unchecked: None, tmp_path: Path) -> None:
    repository = toy_repository(tmp_path / "repository", initialize="time.sleep(600)")
    server = TritonServer(repository, ready_timeout=4)
    others = regions(os.getpid())  # of a server that other tests keep
    with pytest.raises(EngineFailure, match="not ready after 4 s"):
        server.start()
    assert processes(str(repository)) == []
    assert regions(os.getpid()) == others


@pytest.mark.slow
def test_the_machines_own_triton_is_preferred(
    unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid out as in Triton's containers: /opt/tritonserver/{bin,backends/python}, the stub among the latter."""
    wheel = launch.find_installation()
    assert wheel is not None and wheel.libraries is not None, "no wheel, so nothing to lay out"
    root = tmp_path / "opt" / "tritonserver"
    shutil.copytree(wheel.backend, root / "backends" / "python")
    shutil.copy(wheel.stub, root / "backends" / "python")
    (root / "bin").mkdir()
    shutil.copy(wheel.binary, root / "bin")
    (tmp_path / wheel.libraries.name).symlink_to(wheel.libraries)
    monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = launch.find_installation()
    assert found is not None and found.binary == root / "bin" / "tritonserver"
    with TritonServer(toy_repository(tmp_path / "repository")) as server:
        assert len(processes(str(root / "bin" / "tritonserver"))) == 2  # the guard and the server
        url = f"{server.http_url}/v2/models/toy/generate"
        assert http_api.call(url, {"text_input": "x", "max_tokens": 1})["text_output"] == "toy"


# --- what it says when it cannot


def failed(*arguments: str | Path) -> str:
    """The one line of an error with which `trtforge serve` refuses."""
    outcome = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_port_in_use(null_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failed(null_repository, f"--http-port={port}", "--grpc-port=0", "--metrics-port=0")
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in line
    assert "--http-port (0 takes a free one)" in line


def test_same_port_twice(null_repository: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    line = failed(null_repository, f"--http-port={port}", f"--grpc-port={port}", "--metrics-port=0")
    assert "two of the three are the same" in line


def test_no_repository(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in failed(tmp_path / "none", *FREE_PORTS)


def test_missing_model_py(null_repository: Path) -> None:
    (null_repository / "ensemble" / "1" / "model.py").unlink()
    assert "ensemble/1/model.py" in failed(null_repository, *FREE_PORTS)


def test_broken_config(null_repository: Path) -> None:
    config = null_repository / "ensemble" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size", "max_bach_size"))
    line = failed(null_repository, *FREE_PORTS)
    assert "ensemble/config.pbtxt" in line and "max_bach_size" in line


@pytest.mark.slow
def test_a_hang_of_triton_is_seen(unchecked: None, tmp_path: Path) -> None:
    repository = toy_repository(tmp_path / "repository")
    (repository / "toy" / "1" / "model.py").rename(repository / "toy" / "1" / "other.py")
    with pytest.raises(RepositoryError, match=r"no model\.py"):
        TritonServer(repository, ready_timeout=60).start()
    assert processes(str(repository)) == []


@pytest.mark.slow
def test_a_model_that_raises_while_loading_is_quoted(unchecked: None, tmp_path: Path) -> None:
    repository = toy_repository(tmp_path / "repository", initialize="raise ValueError('the engine is gone')")
    with pytest.raises(EngineFailure, match="the engine is gone"):
        TritonServer(repository).start()


@pytest.mark.slow
def test_a_model_that_is_ready_but_does_not_answer(unchecked: None, tmp_path: Path) -> None:
    execute = (
        "request.get_response_sender().send(pb.InferenceResponse([], pb.TritonError('no, thanks')), flags=1)"
    )
    repository = toy_repository(tmp_path / "repository", execute=execute + "; continue")
    with pytest.raises(EngineFailure, match="model toy is loaded but answers: no, thanks"):
        TritonServer(repository).start()


def test_it_is_not_up_before_its_metrics_are(tmp_path: Path) -> None:
    """Triton opens that port last, and `check` reads it."""

    class Fine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = TritonServer(tmp_path)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Fine) as http,
        ThreadingHTTPServer(("127.0.0.1", 0), Fine, bind_and_activate=False) as metrics,
        subprocess.Popen(["sleep", "60"]) as process,
    ):
        metrics.server_bind()  # nobody listens yet: connections are refused
        server.ports = {"http": http.server_port, "grpc": 0, "metrics": metrics.server_port}
        server._process = process
        threading.Thread(target=http.serve_forever, daemon=True).start()
        opening = threading.Timer(0.3, lambda: (metrics.server_activate(), metrics.serve_forever()))
        opening.start()
        try:
            server._await_ready(time.monotonic() + 20)
            with http_api.open_url(server.metrics_url, timeout=5) as response:
                assert response.status == 200
        finally:
            process.kill()
            http.shutdown()
            metrics.shutdown()


@pytest.mark.slow
def test_a_dead_model_ends_the_server(unchecked: None, tmp_path: Path) -> None:
    execute = "if b'die' in pb.get_input_tensor_by_name(request, 'text_input').as_numpy(): os._exit(3)"
    with TritonServer(toy_repository(tmp_path / "repository", execute=execute)) as server:
        server.check()
        watching: list[BaseException] = []

        def watch() -> None:
            try:
                server.watch()
            except EngineFailure as e:
                watching.append(e)

        thread = threading.Thread(target=watch)
        thread.start()
        with pytest.raises(urllib.error.HTTPError):
            http_api.call(f"{server.http_url}/v2/models/toy/generate", {"text_input": "die", "max_tokens": 1})
        thread.join(timeout=20)
        assert "the process of model toy died" in str(watching[0])


@pytest.mark.slow
def test_an_unloaded_model_is_not_a_dead_one(unchecked: None, tmp_path: Path) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=toy")
    with TritonServer(toy_repository(tmp_path / "repository"), arguments=explicit) as server:
        request = urllib.request.Request(f"{server.http_url}/v2/repository/models/toy/unload", b"{}")
        urllib.request.urlopen(request, timeout=30).close()
        wait_until(lambda: not server._find_stubs())
        server.check()


@pytest.mark.slow
def test_a_model_that_was_loaded_again_is_not_a_dead_one(unchecked: None, tmp_path: Path) -> None:
    explicit = ("--model-control-mode=explicit", "--load-model=toy")
    with TritonServer(toy_repository(tmp_path / "repository"), arguments=explicit) as server:
        before = set(server._find_stubs())
        for verb in ("unload", "load"):
            request = urllib.request.Request(f"{server.http_url}/v2/repository/models/toy/{verb}", b"{}")
            urllib.request.urlopen(request, timeout=30).close()
            wait_until(lambda: not before & set(server._find_stubs()))
        server.check()


@pytest.mark.slow
def test_a_server_that_does_not_answer(unchecked: None, tmp_path: Path) -> None:
    with TritonServer(toy_repository(tmp_path / "repository")) as server:
        server.ports["metrics"] = launch.choose_ports("127.0.0.1", {"x": 0})["x"]
        with pytest.raises(EngineFailure, match="Triton does not answer"):
            server.check()


def test_no_run_directory(unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(EnvironmentProblem, match="set TMPDIR"):
        launch.make_run_directory("x")


# --- Triton's log


def test_cause_is_the_last_error_that_means_something() -> None:
    log = [
        'E1129 21:44:02.401514 9325 server.cc:241] "CudaDriverHelper has not been initialized."',
        "Error: Failed to initialize NVML",
        "E1129 21:44:03.1 9325 model_lifecycle.cc:642] \"failed to load 'x' version 1: Internal: nothing\"",
        'I1129 21:44:03.778936 9325 metrics.cc:770] "Collecting CPU metrics"',
    ]
    assert serve.cause(log) == "failed to load 'x' version 1: Internal: nothing"
    assert serve.cause(log[:2]) is None
    assert serve.cause([log[2].replace("nothing", r"ValueError: no\n\nAt:\n  model.py(3)")]) == (
        "failed to load 'x' version 1: Internal: ValueError: no"
    )
    traceback = r"tensorrt_llm: it failed\nTraceback (most recent call last):\n  File x\nValueError: no"
    assert serve.cause([f'E1129 21:44:02.4 93 model.py:1] "{traceback}"', *log[:2]]) == (
        "tensorrt_llm: it failed: ValueError: no"
    )
    assert (
        serve.cause([*log, "Signal (11) received.", " 0# 0x00005 in tritonserver"]) == "Signal (11) received."
    )
    assert serve.cause([*log[:2], "x.errors.EngineFormatError: no manifest"]) == (
        "x.errors.EngineFormatError: no manifest"
    )
