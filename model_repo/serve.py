"""A real Triton Inference Server around a repository, from preflight to clean stop.

    with TritonServer(repository) as server:
        requests.post(f"{server.http_url}/v2/models/ensemble/generate", ...)

It is ready when every text model has answered a request, not when Triton says so. Nothing is left behind: a
guard (guard.py) ends the server when this process dies, and the next start removes what a killed guard left. A
Python model whose process died is reported and ends the server: Triton would go on saying "ready" and answer
each request with an error. Whatever supervises `trtforge serve` (systemd, Kubernetes) should start it again.
"""

import atexit
import collections
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trtforge.model_repo import environment, http_api, launch
from trtforge.plugins.errors import EngineFailure, RepositoryError

READY_TIMEOUT = 600.0  # seconds; a large engine takes minutes to read
POLL_SECONDS = 0.1
WATCH_SECONDS = 2.0
#: Triton goes on waiting for ever after it has logged one of these.
HANGS = {
    "Python model file not found": "a model has no model.py in its version directory",
    "error while loading shared libraries": "the Python stub cannot start; run `trtforge doctor`",
}


class TritonServer:
    """One server process with its own backend directory, log and shared memory.

    Ports: 0 takes a free one; `http_url`, `grpc_url` and `metrics_url` say where it listens. `arguments` go
    to tritonserver as they are. Its whole log is appended to `log_file`; `on_error` gets each error of it once the
    server is up (one before that is what `start` raises).
    """

    def __init__(
        self,
        repository: Path | str,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        address: str = "127.0.0.1",
        ready_timeout: float = READY_TIMEOUT,
        arguments: tuple[str, ...] = (),
        log_file: Path | None = None,
        on_error: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.repository = Path(repository).absolute()
        self.address = address
        self.wanted_ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
        self.ready_timeout = ready_timeout
        self.arguments = arguments
        self.log: collections.deque[str] = collections.deque(maxlen=2000)
        self._log_file = log_file
        self._on_error = on_error
        self._up = False
        self._run_directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._hang: str | None = None
        self._stubs: dict[int, str] = {}

    # --- where it listens

    @property
    def http_url(self) -> str:
        return f"http://{self._host}:{self.ports['http']}"

    @property
    def grpc_url(self) -> str:
        """host:port, as tritonclient.grpc takes it."""
        return f"{self._host}:{self.ports['grpc']}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._host}:{self.ports['metrics']}/metrics"

    @property
    def _host(self) -> str:
        """Where a client on this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)
        return f"[{host}]" if ":" in host else host

    # --- start and stop

    def __enter__(self) -> "TritonServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Return when every text model has answered a request.

        Raises EnvironmentProblem or RepositoryError, before anything is started, if the machine or the
        repository cannot do it; EngineFailure if the server does not come up or a model does not answer.
        """
        surroundings = environment.Surroundings(self.address, self.wanted_ports)
        environment.require(environment.SERVE, surroundings)
        require_sound(self.repository)
        launch.sweep()
        installation = launch.find_installation()
        assert installation is not None  # environment.require has seen it
        self.ports = launch.choose_ports(self.address, self.wanted_ports)
        self._name = launch.run_name()
        self._run_directory = launch.make_run_directory(self._name)
        atexit.register(self.stop)
        try:
            command = launch.server_command(
                installation,
                repository=self.repository,
                backends=launch.backend_directory(installation, self._run_directory),
                region_prefix=self._name,
                address=self.address,
                ports=self.ports,
                extra=self.arguments,
            )
            self._process = self._spawn(command, launch.environment(installation))
            threading.Thread(target=self._read_log, args=(self._process,), daemon=True).start()
            deadline = time.monotonic() + self.ready_timeout
            self._await_ready(deadline)
            for model in self._text_models():
                self._probe(model, deadline)
            self._stubs = self._find_stubs()
            self._up = True
        except BaseException:
            self.stop()
            raise

    def _spawn(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Triton with its guard, in a session of their own: Ctrl-C is ours to handle."""
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py"))]
        grace = launch.EXIT_TIMEOUT_SECONDS + 5
        return subprocess.Popen(
            [*guard, self._name, str(self._run_directory), str(grace), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        file = self._log_file.open("a", buffering=1) if self._log_file else contextlib.nullcontext()
        with file as copy, process.stdout as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self.log.append(line)
                self._hang = self._hang or next((mend for sign, mend in HANGS.items() if sign in line), None)
                if copy is not None:
                    copy.write(line + "\n")
                if self._up and is_error(line):
                    self._on_error(readable(line))

    def stop(self) -> None:
        """Let requests in flight end, then the server; safe to call twice and from any state.

        An interrupt while it waits ends the server at once.
        """
        atexit.unregister(self.stop)
        process, self._process, self._up = self._process, None, False
        if process is None:
            if self._run_directory is not None:
                launch.remove(self._run_directory)
            return
        process.send_signal(signal.SIGTERM if self._hang is None else signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()

    # --- is it well

    def check(self) -> None:
        """Raises EngineFailure if the server has ended, one of its Python models has died or an engine has failed.

        A model that is not READY was unloaded, and its process with it.
        """
        if self._process is None or self._process.poll() is not None:
            raise EngineFailure(f"Triton ended: {self._cause()}")
        try:
            alive = self._find_stubs()
            gone = {self._stubs[pid] for pid in self._stubs.keys() - alive.keys()}
            with http_api.open_url(self.metrics_url, timeout=30) as response:
                page = response.read().decode()
            failed = set(
                re.findall(r'^trtforge_engine_healthy\{.*?model="([^"]*)".*?\} 0', page, re.MULTILINE)
            )
            ready = {m for m, state in self._states().items() if state == "READY"} if gone | failed else set()
        except OSError as e:
            raise EngineFailure(f"Triton does not answer ({e}): {self._cause()}") from e
        # One that was loaded again has another process by now.
        if dead := sorted((gone & ready) - set(self._find_stubs().values())):
            raise EngineFailure(
                f"the process of model {dead[0]} died, Triton does not start it again ({self._cause()}); "
                "start the server again"
            )
        self._stubs = alive
        if failed & ready:
            raise EngineFailure(f"the engine has failed ({self._cause()}); start the server again")

    def watch(self) -> None:
        """Block as long as all is well; raises EngineFailure when it is not."""
        while True:
            self.check()
            time.sleep(WATCH_SECONDS)

    def _await_ready(self, deadline: float) -> None:
        process = self._process
        assert process is not None
        while True:
            if self._hang is not None:
                raise RepositoryError(f"{self.repository}: {self._hang}; Triton would wait for ever")
            if process.poll() is not None:
                raise EngineFailure(f"Triton ended while it loaded {self.repository}: {self._cause()}")
            with (
                contextlib.suppress(OSError),
                http_api.open_url(f"{self.http_url}/v2/health/ready", timeout=5),
                http_api.open_url(self.metrics_url, timeout=5),  # Triton opens this port last
            ):
                return
            if time.monotonic() > deadline:
                raise EngineFailure(f"Triton is not ready after {self.ready_timeout:g} s: {self._cause()}")
            time.sleep(POLL_SECONDS)

    def _text_models(self) -> list[str]:
        """The loaded models that take a prompt and a number of tokens, by Triton's own account."""
        ready = [name for name, state in self._states().items() if state == "READY"]
        metadata = {name: http_api.call(f"{self.http_url}/v2/models/{name}") for name in ready}
        inputs = {name: {tensor["name"] for tensor in m["inputs"]} for name, m in metadata.items()}
        return [name for name, has in inputs.items() if {"text_input", "max_tokens"} <= has]

    def _states(self) -> dict[str, str | None]:
        index = http_api.call(f"{self.http_url}/v2/repository/index", {})
        return {model["name"]: model.get("state") for model in index}

    def _probe(self, model: str, deadline: float) -> None:
        """One token, for real: a model may be READY and never answer."""
        request = {"text_input": "Hello", "max_tokens": 1}
        url = f"{self.http_url}/v2/models/{model}/generate"
        try:
            http_api.call(url, request, timeout=max(1.0, deadline - time.monotonic()))
        except urllib.error.HTTPError as e:
            raise EngineFailure(f"model {model} is loaded but answers: {http_api.error_text(e)}") from e
        except OSError as e:
            raise EngineFailure(f"model {model} is loaded but does not answer ({e}): {self._cause()}") from e

    def _find_stubs(self) -> dict[int, str]:
        """pid -> model of the server's live Python stubs, whose first argument is .../MODEL/1/model.py."""
        assert self._process is not None
        stubs = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state not in "ZX":
                    arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                    if arguments[0].endswith(launch.STUB):
                        stubs[int(entry.name)] = Path(arguments[1]).parts[-3]
        return stubs

    def _cause(self) -> str:
        return cause(list(self.log)) or "the log says nothing"


TOLD = 3  # faults of a repository, in the one line that refuses it


def require_sound(repository: Path) -> None:
    """Raises RepositoryError with the first of what `trtforge check` finds."""
    from trtforge.model_repo.check import check

    faults = check(repository)
    if faults:
        told = [str(fault) for fault in faults[:TOLD]]
        if len(faults) > TOLD:
            told.append(f"and {len(faults) - TOLD} more: trtforge check {repository}")
        raise RepositoryError("; ".join(told))


# Triton's lines on a machine without a GPU that mean nothing.
_HARMLESS = re.compile("CudaDriverHelper|NVML|DCGM|pinned")
_SEVERE = re.compile(r"[EF]\d{4} |error: |(\w+\.)*\w+(Error|Exception|Failure): ")
_LOCATION = re.compile(r'^[EFWI]\d{4} \S+ \d+ [\w.]+:\d+\] "?')


def is_error(line: str) -> bool:
    return _SEVERE.match(line) is not None and not _HARMLESS.search(line)


def readable(line: str) -> str:
    """A line of Triton's log without time and place, and of the traceback that it may carry only the end."""
    first, *more = _LOCATION.sub("", line).rstrip('"').split("\\n")
    return f"{first}: {more[-1]}" if any(part.startswith("Traceback") for part in more) else first


def cause(log: list[str]) -> str | None:
    """The line of Triton's log that tells why it failed: why a model was not loaded, else the last error."""
    errors = [line for line in log if is_error(line)]
    crashes = [line for line in log if re.fullmatch(r"Signal \(\d+\) received\.", line)]
    of_models = [line for line in errors if re.search("failed to load (model )?'|poll model", line)]
    raised = [line for line in errors if "Traceback (most recent call last)" in line]
    shared = [line for line in log if "error while loading shared libraries" in line]
    return next(
        (readable(lines[-1]) for lines in (shared, crashes, of_models, raised, errors) if lines), None
    )


def run(server: TritonServer, echo: Callable[[str], None]) -> None:
    """`trtforge serve`: until SIGINT or SIGTERM. Raises ForgeError when the server fails."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        with server:
            echo(f"ready: HTTP {server.http_url}   gRPC {server.grpc_url}   metrics {server.metrics_url}")
            server.watch()
    except KeyboardInterrupt:
        echo("stopped")
    finally:
        signal.signal(signal.SIGTERM, previous)
