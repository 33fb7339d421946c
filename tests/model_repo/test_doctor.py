"""`trtforge doctor` in sabotaged environments: each gets its own right line, and only that line changes.

The sabotage is real: a virtual environment of its own whose packages are the ones under test, with one thing
replaced; a bound port; a private mount namespace.
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from trtforge.model_repo import launch, preflight

COMMAND = "from trtforge.builder.cli import main; main()"
PURELIB = Path(sysconfig.get_path("purelib"))
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


class Sandbox:
    """A virtual environment in which the packages of this one are found after its own."""

    def __init__(self, root: Path, base: str = sys.executable) -> None:
        subprocess.run([base, "-m", "venv", "--without-pip", str(root)], check=True)
        self.python = root / "bin" / "python3"
        (self.packages,) = root.glob("lib/python3*/site-packages")
        (self.packages / "base.pth").write_text(f"import site; site.addsitedir({str(PURELIB)!r})\n")
        self.path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def doctor(self, *arguments: str, before: str = "") -> tuple[int, dict[str, str]]:
        """Exit status, and the lines that are not ok: name -> line. `before` is shell that runs first, as the root
        of a mount namespace of its own."""
        command = [str(self.python), "-c", COMMAND, "doctor", *(arguments or FREE_PORTS)]
        if before:
            shell = f'{before} && exec "$@"'
            command = ["unshare", "--map-root-user", "--mount", "/bin/sh", "-ec", shell, "sh", *command]
        environment = {**os.environ, "PATH": self.path}
        outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert outcome.stderr == "", outcome.stderr
        lines = [line.strip() for line in outcome.stdout.splitlines()]
        assert any(line.startswith("ok interpreter: ") for line in lines), outcome.stdout
        faults = [line for line in lines if line.startswith(("NO ", "-- "))]
        return outcome.returncode, {line[3:].partition(": ")[0]: line for line in faults}

    def replace_distribution(self, name: str, version: str) -> None:
        metadata = self.packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The faults of this machine without sabotage: none that is fatal."""
    status, faults = Sandbox(tmp_path_factory.mktemp("healthy") / "v").doctor()
    assert status == 0, faults
    assert not [line for line in faults.values() if line.startswith("NO")]
    return faults


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "v")


def only_new_fault(faults: dict[str, str], healthy: dict[str, str], name: str) -> str:
    assert faults.keys() - healthy.keys() == {name}, faults
    return faults[name]


def needs_mount_namespace(function: Callable[..., None]) -> Callable[..., None]:
    works = (
        shutil.which("unshare")
        and not subprocess.run(
            ["unshare", "--map-root-user", "--mount", "true"], capture_output=True
        ).returncode
    )
    return pytest.mark.skipif(not works, reason="this system gives us no mount namespace")(function)


def test_numpy_2(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    sandbox.replace_distribution("numpy", "2.1.3")
    status, faults = sandbox.doctor()
    line = only_new_fault(faults, healthy, "numpy")
    assert status == 1
    assert "numpy 2.1.3 silently corrupts" in line and 'pip install "numpy<2"' in line


@needs_mount_namespace
def test_no_libpython(tmp_path: Path, healthy: dict[str, str]) -> None:
    static = [path for name in preflight.CANDIDATES for path in [f"/usr/bin/{name}"] if _is_static(path)]
    if not static:
        pytest.skip("every Python here is itself linked to its libpython")
    sandbox = Sandbox(tmp_path / "v", static[0])
    find = f"import sys; sys.path.insert(0, {str(Path(preflight.__file__).parent)!r}); import preflight"
    found = subprocess.run(
        [static[0], "-c", f"{find}; print(preflight.find_libpython() or '')"], capture_output=True, text=True
    ).stdout.strip()
    hide = f"mount --bind /dev/null {os.path.realpath(found)}" if found else "true"
    status, faults = sandbox.doctor(before=hide)
    assert status == 1
    assert "apt-get install libpython3-dev" in faults["libpython"]
    assert "libpython" in faults["libpython"] and ".so.1.0" in faults["libpython"]


def _is_static(python: str) -> bool:
    ldd = subprocess.run(["ldd", python], capture_output=True, text=True)
    return ldd.returncode == 0 and "libpython" not in ldd.stdout


def test_no_compiler(sandbox: Sandbox, healthy: dict[str, str], tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("ldd", "bash", "sh"):
        (tools / tool).symlink_to(shutil.which(tool) or "/bin/sh")
    sandbox.path = str(tools)
    _, faults = sandbox.doctor()
    line = only_new_fault(faults, healthy, "compiler")
    assert "no C++ compiler" in line and "apt-get install g++" in line


def test_stub_of_another_version(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    installation = launch.find_installation()
    assert installation is not None
    if installation.libraries is None:
        pytest.skip("the Triton here is the machine's own")
    stubs = installation.stub.parents[1]
    other = next(path for path in sorted(stubs.iterdir()) if path.name != VERSION)
    sandbox.replace_distribution("nvidia_pytriton", "0.7.0")
    triton = sandbox.packages / "pytriton" / "tritonserver"
    (triton / "python_backend_stubs" / VERSION).mkdir(parents=True)
    shutil.copy(other / launch.STUB, triton / "python_backend_stubs" / VERSION)
    for name in ("bin", "backends"):
        (triton / name).symlink_to(stubs.parent / name)
    (sandbox.packages / "nvidia_pytriton.libs").symlink_to(installation.libraries)
    status, faults = sandbox.doctor()
    line = only_new_fault(faults, healthy, "stub")
    assert status == 1
    assert f"is built for Python {other.name}, this is Python {VERSION}" in line and "pip install" in line


def test_port_taken(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, faults = sandbox.doctor(f"--grpc-port={port}", "--http-port=0", "--metrics-port=0")
    line = only_new_fault(faults, healthy, "grpc port")
    assert status == 1
    assert f"127.0.0.1:{port} cannot be used (Address already in use)" in line and "--grpc-port" in line


@needs_mount_namespace
def test_shared_memory_not_writable(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    status, faults = sandbox.doctor(before="mount -t tmpfs -o ro tmpfs /dev/shm")
    line = only_new_fault(faults, healthy, "shared memory")
    assert status == 1
    assert "/dev/shm is not writable" in line and "--shm-size" in line


@needs_mount_namespace
def test_shared_memory_too_small(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    _, faults = sandbox.doctor(before="mount -t tmpfs -o size=8m tmpfs /dev/shm")
    assert "8 MB free in /dev/shm; 64 MB are needed" in only_new_fault(faults, healthy, "shared memory")


def test_wrong_openvino(sandbox: Sandbox, healthy: dict[str, str]) -> None:
    sandbox.replace_distribution("openvino", "2025.1.0")
    status, faults = sandbox.doctor()
    line = only_new_fault(faults, healthy, "openvino")
    assert status == 1
    assert "openvino 2025.1.0" in line and "pip install openvino==" in line
