"""The table of checks of a machine: one list, from which `doctor` prints all and `serve` refuses to start.

Each check looks at the real thing and gives one Finding; what needs nothing installed is in preflight.py.
"""

import contextlib
import ctypes
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtforge.model_repo import launch, preflight
from trtforge.model_repo.preflight import Finding
from trtforge.plugins.errors import EnvironmentProblem

DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
NEEDED_SHM = 64 << 20  # three models' regions of 4 MB, which grow with long prompts and many streams

BUILD, SERVE, CLIENT, TENSORRT = "CPU engines", "serving with Triton", "sending requests", "TensorRT engines"
PURPOSES = (BUILD, SERVE, CLIENT, TENSORRT)


@dataclass(frozen=True)
class Surroundings:
    """Where a server is to listen; a port 0 will be chosen."""

    address: str = "127.0.0.1"
    ports: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_PORTS))


@dataclass(frozen=True)
class Check:
    look: Callable[[Surroundings], Finding | list[Finding]]
    needed_for: tuple[str, ...]


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numpy_version(_: Surroundings) -> Finding:
    version = version_of("numpy")
    mend = 'pip install "numpy<2" (the wheel\'s Python stub was built against numpy 1)'
    if version is None:
        return Finding("numpy", False, "not installed", mend)
    installation = launch.find_installation()
    too_new = installation is not None and installation.old_numpy and int(version.partition(".")[0]) >= 2
    detail = f"numpy {version}" + (
        " silently corrupts every tensor in Triton's Python models" if too_new else ""
    )
    return Finding("numpy", not too_new, detail, mend)


def triton_server(_: Surroundings) -> Finding:
    installation = launch.find_installation()
    if installation is None:
        detail = f"no tritonserver on PATH or in /opt/tritonserver, and no {launch.SERVER_WHEEL} wheel"
        return Finding("tritonserver", False, detail, 'pip install "trtforge[serve]"')
    if not os.access(installation.binary, os.X_OK):
        detail = f"{installation.binary} is not there or not executable"
        return Finding("tritonserver", False, detail, f"pip install --force-reinstall {launch.SERVER_WHEEL}")
    return Finding("tritonserver", True, installation.origin)


def python_stub(_: Surroundings) -> Finding:
    """The stub that embeds Python: the one for this interpreter, with all its libraries."""
    installation = launch.find_installation()
    if installation is None:
        return Finding("stub", False, "no Triton, so no Python stub", 'pip install "trtforge[serve]"')
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    reinstall = f"pip install --force-reinstall --no-deps {launch.SERVER_WHEEL}"
    if not installation.stub.is_file():
        return Finding(
            "stub", False, f"{installation.stub} is missing", f"{reinstall}, with Python 3.10 to 3.12"
        )
    version, missing = launch.stub_libraries(installation)
    if version != ours:
        mend = reinstall if installation.libraries else f"run trtforge with python{version}"
        detail = f"{installation.stub} is built for Python {version}, this is Python {ours}"
        return Finding("stub", False, detail, mend)
    if missing:
        mend = "apt-get install libpython3-dev" if missing[0].startswith("libpython") else reinstall
        return Finding("stub", False, f"{installation.stub} lacks {', '.join(missing)}", mend)
    return Finding("stub", True, f"for Python {version}, all its libraries found")


def server_interpreter(_: Surroundings) -> Finding:
    """Triton's stub takes the first `python3` on PATH for its prefix: ours, if it has that name."""
    python3 = Path(sys.executable).parent / "python3"
    mend = "run trtforge from a virtual environment"
    try:
        probe = subprocess.run(
            [python3, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        return Finding("server's python", False, f"{python3} does not run ({e})", mend)
    prefix = probe.stdout.strip()
    detail = f"{python3}, prefix {prefix}"
    return Finding("server's python", prefix == sys.prefix, detail, mend)


def shared_memory(_: Surroundings) -> Finding:
    """Triton's Python models exchange tensors through POSIX shared memory."""
    remount = "mount it writable, with size (docker run --shm-size=1g)"
    try:
        with tempfile.NamedTemporaryFile(dir=launch.SHM, prefix=launch.run_name()):
            pass
    except OSError as e:
        return Finding("shared memory", False, f"{launch.SHM} is not writable ({e.strerror})", remount)
    free = shutil.disk_usage(launch.SHM).free
    detail = f"{free >> 20} MB free in {launch.SHM}"
    return Finding(
        "shared memory", free >= NEEDED_SHM, detail, f"{NEEDED_SHM >> 20} MB are needed: {remount}"
    )


def ports(surroundings: Surroundings) -> list[Finding]:
    findings = []
    for name, port in surroundings.ports.items():
        if port:
            problem = launch.port_problem(surroundings.address, port)
            detail = f"{surroundings.address}:{port} " + (
                f"cannot be used ({problem})" if problem else "is free"
            )
            mend = f"stop what listens there, or give another with --{name}-port (0 takes a free one)"
            findings.append(Finding(f"{name} port", problem is None, detail, mend))
    twice = len({p for p in surroundings.ports.values() if p}) < sum(
        1 for p in surroundings.ports.values() if p
    )
    if twice:
        findings.append(Finding("ports", False, "two of the three are the same", "give three different ones"))
    return findings


def triton_client(_: Surroundings) -> Finding:
    version = version_of("tritonclient")
    detail = f"tritonclient {version}" if version else "tritonclient is not installed"
    return Finding("client", version is not None, detail, 'pip install "trtforge[serve]"')


def openvino_version(_: Surroundings) -> Finding:
    """The kernels are compiled against one exact openvino: its ABI changes between releases."""
    version, wanted = version_of("openvino"), _required_version("openvino")
    detail = f"openvino {version}" if version else "openvino is not installed"
    mend = f"pip install openvino=={wanted}, then install trtforge again"
    return Finding("openvino", version is not None and version.startswith(wanted or ""), detail, mend)


def _required_version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("trtforge") or ():
            name, pinned, version = requirement.partition("==")
            if pinned and name == distribution:
                return version
    return None


def cpu_kernels(_: Surroundings) -> Finding:
    """Load both compiled libraries for real, in a process of their own: a wrong ABI may crash it."""
    code = "import openvino; from trtforge.plugins import cpu; from trtforge.plugins.cpu import native_host; "
    code += "cpu.register(openvino.Core()); native_host.library(); print(cpu.library_path().parent)"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if probe.returncode == 0:
        return Finding("CPU kernels", True, probe.stdout.strip())
    lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
    return Finding(
        "CPU kernels", False, f"do not load ({lines[-1]})", "install trtforge again (it compiles them)"
    )


def compiler(_: Surroundings) -> Finding:
    return preflight.compiler()._replace(fatal=False)  # the kernels exist; it is needed to compile them again


def cuda_driver(_: Surroundings) -> Finding:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        detail, mend = (
            "no CUDA driver (libcuda.so.1)",
            "needed to build and run TensorRT engines, not for the CPU",
        )
        return Finding("CUDA driver", False, detail, mend, fatal=False)
    return Finding("CUDA driver", True, "libcuda.so.1 loads")


def tensorrt(_: Surroundings) -> Finding:
    version = version_of("tensorrt")
    detail = f"tensorrt {version}" if version else "tensorrt is not installed"
    mend = "needed for --target tensorrt only; builds of that target do not exist yet"
    return Finding("TensorRT", version is not None, detail, mend, fatal=False)


CHECKS = (
    Check(lambda _: preflight.interpreter(), (BUILD, SERVE)),
    Check(lambda _: preflight.glibc(), (BUILD, SERVE)),
    Check(compiler, (BUILD,)),
    Check(openvino_version, (BUILD,)),
    Check(cpu_kernels, (BUILD,)),
    Check(triton_server, (SERVE,)),
    Check(lambda _: preflight.libpython(), (SERVE,)),
    Check(python_stub, (SERVE,)),
    Check(server_interpreter, (SERVE,)),
    Check(numpy_version, (SERVE,)),
    Check(shared_memory, (SERVE,)),
    Check(ports, (SERVE,)),
    Check(triton_client, (CLIENT, SERVE)),
    Check(cuda_driver, (TENSORRT,)),
    Check(tensorrt, (TENSORRT,)),
)


def examine(check: Check, surroundings: Surroundings) -> list[Finding]:
    findings = check.look(surroundings)
    return [findings] if isinstance(findings, Finding) else findings


def require(purpose: str, surroundings: Surroundings) -> None:
    """Raises EnvironmentProblem with all that stands in the way of `purpose`, one line each."""
    faults = [
        finding
        for check in CHECKS
        if purpose in check.needed_for
        for finding in examine(check, surroundings)
        if not finding.ok and finding.fatal
    ]
    if faults:
        raise EnvironmentProblem("; ".join(fault.line() for fault in faults))
