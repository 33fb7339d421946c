"""preflight.py as `make` runs it: by whatever python3 there is, before anything is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge.model_repo import preflight

SCRIPT = Path(preflight.__file__)


def run(
    *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-I", "-S", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment or None
    )


def other_python(*versions: str) -> str:
    """A working interpreter of one of these versions, or skip."""
    for version in versions:
        candidates = [
            shutil.which(f"python{version}"),
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
        ]
        for path in filter(None, candidates):
            if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                return path
    pytest.skip(f"no Python {', '.join(versions)} here")


def test_prints_nothing_but_the_path_of_a_suitable_python() -> None:
    outcome = run("--python", sys.executable)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == sys.executable + "\n"
    assert outcome.stderr == ""


@pytest.mark.parametrize("versions", [("3.6",), ("3.7", "3.8", "3.9"), ("3.13", "3.14")])
def test_an_unsuitable_python_can_run_it_and_is_named(versions: tuple[str, ...]) -> None:
    python = other_python(*versions)
    outcome = run("--python", python, python=python)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("preflight: interpreter: ") and python in line
    assert "needs 3.10 to 3.12" in line and "apt-get install python3.12" in line


def test_an_unsuitable_python_finds_a_suitable_one() -> None:
    python = other_python("3.6", "3.7", "3.8", "3.9", "3.13")
    outcome = subprocess.run([python, str(SCRIPT)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    found = subprocess.run([outcome.stdout.strip(), "-V"], capture_output=True, text=True).stdout
    assert any(f"Python {wanted}." in found for wanted in ("3.10", "3.11", "3.12"))


def test_no_compiler_on_path(tmp_path: Path) -> None:
    outcome = run("--python", sys.executable, PATH=str(tmp_path))
    assert outcome.returncode == 1
    fault, hint = outcome.stderr.splitlines()
    assert fault == "preflight: compiler: no C++ compiler (g++, clang++) on PATH; apt-get install g++"
    assert "apt-get install git make g++ python3-venv libpython3-dev" in hint


def test_cxx_that_does_not_exist(tmp_path: Path) -> None:
    outcome = run("--python", sys.executable, PATH=str(tmp_path), CXX="no-such-compiler -O2")
    assert outcome.stderr.startswith("preflight: compiler: CXX=no-such-compiler -O2 is not on PATH")


def test_no_such_interpreter() -> None:
    outcome = run("--python", "no-such-python")
    assert outcome.returncode == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("preflight: interpreter: no working no-such-python; apt-get install python3 ")


def test_an_interpreter_that_does_not_run(tmp_path: Path) -> None:
    """As pyenv's shim of a version that is not selected: on PATH, but it only says so and fails."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2; echo more >&2; exit 127\n")
    shim.chmod(0o755)
    outcome = run("--python", str(shim))
    assert outcome.returncode == 1
    (line,) = outcome.stderr.splitlines()
    assert line == (
        f"preflight: interpreter: {shim} does not run (pyenv: python3.12: command not found); "
        "give the path of an interpreter itself, PYTHON=/path/to/python3.12"
    )


def test_too_little_disk() -> None:
    outcome = run("--python", sys.executable, "--disk-gb", "1e9")
    assert outcome.returncode == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("preflight: disk: ") and "make room" in line


def test_libpython_must_be_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    monkeypatch.setattr(preflight.sysconfig, "get_config_var", lambda _: str(tmp_path))
    monkeypatch.setattr(preflight.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(preflight, "_loader_cache", dict)
    assert not preflight.libpython().ok
    (tmp_path / name).write_bytes(b"not a library")
    assert not preflight.libpython().ok
    assert "libpython3-dev" in preflight.libpython().mend
    (tmp_path / name).write_bytes(b"\x7fELF")
    assert preflight.libpython() == ("libpython", True, str(tmp_path / name), "", True)
