"""What stands at an engine's final name is whole or absent; what is not an engine is never replaced."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge.builder.engine_dir import staging
from trtforge.plugins.errors import EnvironmentProblem, InvalidArgument
from trtforge.runtime.manifest import MANIFEST_NAME


def write_engine(directory: Path, mark: str = "new") -> None:
    (directory / "model.bin").write_text(mark)
    (directory / MANIFEST_NAME).write_text(json.dumps({"format_version": 1, "files": {"model.bin": {}}}))


def names(directory: Path) -> list[str]:
    return sorted(f.name for f in directory.iterdir())


def test_whole_engine_appears_under_its_name(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "engine"
    with staging(output) as directory:
        write_engine(directory)
        assert not output.exists()
    assert names(output) == [MANIFEST_NAME, "model.bin"]
    assert names(output.parent) == ["engine"]
    assert output.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_empty_directory_and_engine_are_replaced(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    output.mkdir()
    for mark in ("first", "second"):
        with staging(output) as directory:
            write_engine(directory, mark)
        assert (output / "model.bin").read_text() == mark
        assert names(tmp_path) == ["engine"]


def test_failed_build_keeps_the_old_engine_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with staging(output) as directory:
        write_engine(directory, "old")
    with pytest.raises(ZeroDivisionError), staging(output) as directory:
        write_engine(directory, "new")
        raise ZeroDivisionError
    assert (output / "model.bin").read_text() == "old"
    assert names(tmp_path) == ["engine"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"thesis.txt": "x"}, "exists and is not an engine directory"),
        ({MANIFEST_NAME: "{}"}, "exists and is not an engine directory"),
        ({MANIFEST_NAME: "[1]"}, "exists and is not an engine directory"),
        ({MANIFEST_NAME: '{"format_version": 1, "files": {}}', "thesis.txt": "x"}, "holds 'thesis.txt'"),
    ],
)
def test_what_is_not_an_engine_is_never_replaced(tmp_path: Path, files: dict[str, str], message: str) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    for name, text in files.items():
        (output / name).write_text(text)
    with pytest.raises(InvalidArgument, match=message), staging(output):
        pytest.fail("the build went on")
    assert {f.name: f.read_text() for f in output.iterdir()} == files
    assert names(tmp_path) == ["mine"]


def test_file_at_the_output_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "mine"
    output.write_text("x")
    with pytest.raises(InvalidArgument, match="is not a directory"), staging(output):
        pytest.fail("the build went on")


def test_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = pytest.raises(EnvironmentProblem, match="file/engine: cannot write the engine")
    with refused, staging(tmp_path / "file" / "engine"):
        pytest.fail("the build went on")


def test_disk_that_fills_up_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
        with pytest.raises(EnvironmentProblem) as full, staging(tmp_path / "engine") as directory:
            (directory / "model.bin").write_bytes(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write the engine: File too large" in str(full.value)
    assert "\n" not in str(full.value)
    assert names(tmp_path) == []


BUILD_THAT_STOPS = """
import sys, time
from pathlib import Path
from trtforge.builder.engine_dir import staging
with staging(Path(sys.argv[1])) as directory:
    (directory / "model.bin").write_text("half")
    print("written", flush=True)
    time.sleep(60)
"""


def test_next_build_removes_what_a_killed_one_left_but_not_a_running_one(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    builds = [
        subprocess.Popen([sys.executable, "-c", BUILD_THAT_STOPS, str(output)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for build in builds:
            assert build.stdout is not None and build.stdout.readline() == b"written\n"
        assert len(names(tmp_path)) == 2
        builds[0].send_signal(signal.SIGKILL)
        builds[0].wait()
        assert not output.exists()
        with staging(output) as directory:
            write_engine(directory)
        left = names(tmp_path)
        assert left[-1] == "engine" and len(left) == 2, "the running build's directory and the new engine"
    finally:
        for build in builds:
            build.kill()
            build.wait()
            assert build.stdout is not None
            build.stdout.close()
