"""Where Triton is on this machine and how it is started: binary, Python stub, environment, ports, leftovers.

Two kinds of installation: the `tritonserver` of the machine or container, and the server binary that the
nvidia-pytriton wheel carries, of which nothing else is used.
"""

import contextlib
import functools
import importlib.metadata
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtforge.model_repo import preflight
from trtforge.plugins.errors import EnvironmentProblem

SHM = Path("/dev/shm")
STUB = "triton_python_backend_stub"
SERVER_WHEEL = "nvidia-pytriton"
SHM_BYTES_PER_INSTANCE = 4 << 20
SHM_GROWTH_BYTES = 1 << 20
EXIT_TIMEOUT_SECONDS = 5  # that Triton waits for requests in flight


@dataclass(frozen=True)
class Installation:
    """A Triton that can be started here."""

    binary: Path
    backend: Path  # the python backend's directory, with libtriton_python.so
    stub: Path
    origin: str
    libraries: Path | None = None  # for LD_LIBRARY_PATH
    old_numpy: bool = False  # the stub corrupts tensors under numpy 2


def find_installation() -> Installation | None:
    """The machine's own Triton if there is one, else the wheel's; None if there is neither."""
    own = shutil.which("tritonserver") or shutil.which("tritonserver", path="/opt/tritonserver/bin")
    if own:
        binary = Path(own).resolve()
        backend = binary.parents[1] / "backends" / "python"
        return Installation(binary, backend, backend / STUB, f"tritonserver of this machine, {own}")
    try:
        wheel = importlib.metadata.distribution(SERVER_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    root = Path(str(wheel.locate_file("pytriton/tritonserver")))
    return Installation(
        binary=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / STUB,
        origin=f"server binary of {SERVER_WHEEL} {wheel.version}",
        libraries=Path(str(wheel.locate_file("nvidia_pytriton.libs"))),
        old_numpy=True,
    )


def environment(installation: Installation) -> dict[str, str]:
    """The server's environment: our interpreter is the first `python3` on PATH, which decides the stub's
    prefix, and the stub finds the shared libpython and, when copied, the wheel's own libraries."""
    libpython = preflight.find_libpython()
    library_path = [
        str(installation.libraries) if installation.libraries else "",
        str(Path(libpython).parent) if libpython else "",
        os.environ.get("LD_LIBRARY_PATH", ""),
    ]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, library_path)),
    }


def stub_libraries(installation: Installation) -> tuple[str | None, tuple[str, ...]]:
    """What the dynamic loader says of the stub: the Python version it is linked with, and what it lacks."""
    ldd = subprocess.run(
        ["ldd", str(installation.stub)], env=environment(installation), capture_output=True, text=True
    )
    text = ldd.stdout + ldd.stderr
    version = re.search(r"libpython(\d+\.\d+)\.so", text)
    missing = re.findall(r"(\S+) => not found", text)
    missing += re.findall(r"error while loading shared libraries: (\S+?):", text)
    return (version.group(1) if version else None), tuple(missing)


def backend_directory(installation: Installation, parent: Path) -> Path:
    """A backend directory with the Python backend and the one stub for this interpreter. Triton wants them in
    one place; the wheel keeps a stub per Python version elsewhere, and its directory may not be writable."""
    if installation.stub.parent == installation.backend:
        return installation.backend.parent
    backend = parent / "backends" / "python"
    shutil.copytree(installation.backend, backend, ignore=shutil.ignore_patterns("__pycache__", STUB))
    shutil.copy(installation.stub, backend / STUB)
    (backend / STUB).chmod(0o755)  # unzipping with Python's zipfile loses the bit
    return backend.parent


def server_command(
    installation: Installation,
    *,
    repository: Path,
    backends: Path,
    region_prefix: str,
    address: str,
    ports: Mapping[str, int],
    extra: tuple[str, ...] = (),
) -> list[str]:
    """Triton's command line; `ports` has http, grpc and metrics."""
    return [
        str(installation.binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--http-address={address}",
        f"--grpc-address={address}",
        f"--metrics-address={address}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
        f"--exit-timeout-secs={EXIT_TIMEOUT_SECONDS}",
        f"--backend-config=python,shm-region-prefix-name={region_prefix}",
        f"--backend-config=python,shm-default-byte-size={SHM_BYTES_PER_INSTANCE}",
        f"--backend-config=python,shm-growth-byte-size={SHM_GROWTH_BYTES}",
        *extra,
    ]


# --- ports


def port_problem(address: str, port: int) -> str | None:
    """Why a server cannot listen there, or None."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        # Connections of a server that has just ended may linger; Triton's front ends set this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except (OSError, OverflowError) as e:
            return e.strerror if isinstance(e, OSError) and e.strerror else str(e)
    return None


def choose_ports(address: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """The wanted ports, with a free one in the place of each 0; they are all different."""
    with contextlib.ExitStack() as held:
        chosen = {}
        for name, port in wanted.items():
            if port == 0:
                probe = held.enter_context(
                    socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
                )
                probe.bind((address, 0))
                port = probe.getsockname()[1]
            chosen[name] = port
        return chosen


# --- leftovers

_counter = itertools.count()


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; with its pid, that names it for good."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@functools.cache
def _pid_namespace() -> str:
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


def run_name() -> str:
    """A name for one server's shared memory and run directory that tells whether its owner lives."""
    return f"trtforge-{_pid_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}-"


def _owner_is_dead(text: str) -> bool:
    """Whether a path or argument bears the run name of an owner that is dead. Other containers may share /dev/shm,
    and their pids mean nothing here, so only names of our own pid namespace count."""
    owner = re.search(rf"trtforge-{_pid_namespace()}-(\d+)-(\d+)-\d+-", text)
    return owner is not None and _start_time(int(owner.group(1))) != owner.group(2)


def sweep() -> None:
    """Remove what servers of ours left behind whose guard was killed too: stubs, shared memory, directories."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program, *arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if program.endswith(STUB) and any(map(_owner_is_dead, arguments)):
                os.kill(int(process.name), signal.SIGKILL)
    for directory in (SHM, Path(tempfile.gettempdir())):
        for path in directory.glob("trtforge-*"):
            if _owner_is_dead(path.name):
                remove(path)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # another sweep was faster, or another user's
            path.unlink()


def make_run_directory(name: str) -> Path:
    """A private directory for one server's backend copy and log."""
    try:
        return Path(tempfile.mkdtemp(prefix=name))
    except OSError as e:
        where = tempfile.gettempdir()
        raise EnvironmentProblem(
            f"cannot make a directory in {where}: {e}; set TMPDIR to a writable place"
        ) from e
