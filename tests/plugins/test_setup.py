"""setup.py: compiles what changed, and says in one line what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """setup.py, the kernels and as much of the rest as setuptools wants to see."""
    place = tmp_path / "tree"
    (place / "plugins").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", place)
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "plugins" / "cpu", place / "plugins" / "cpu", ignore=ignore)
    (place / "pyproject.toml").write_text(
        '[project]\nname = "trtforge"\nversion = "0"\n[tool.setuptools]\npackages = []\n'
    )
    return place


def build(place: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", "out"]
    env = {k: v for k, v in os.environ.items() if k != "CXX"} | environment
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)


def times(place: Path, pattern: str) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in place.glob(pattern)}


@pytest.mark.slow
def test_only_what_changed_is_compiled(source_tree: Path) -> None:
    assert build(source_tree).returncode == 0
    libraries, objects = times(source_tree, "out/**/*.so"), times(source_tree, "build/cpu/*.o")
    assert sorted(libraries) == ["libtrtforge_cpu.so", "libtrtforge_host.so"]
    built = sorted(source_tree.glob("out/**/*.so"))
    original = [library.read_bytes() for library in built]

    assert build(source_tree).returncode == 0
    assert times(source_tree, "out/**/*.so") == libraries
    assert times(source_tree, "build/cpu/*.o") == objects

    source = source_tree / "plugins" / "cpu" / "kernels.cpp"
    text = source.read_text()
    source.write_text(
        text + 'extern "C" __attribute__((visibility("default"))) int changed() { return 1; }\n'
    )
    assert build(source_tree).returncode == 0
    assert all(library.read_bytes() != was for library, was in zip(built, original, strict=True))
    new = set(times(source_tree, "build/cpu/*.o")) - set(objects)
    assert len(new) == 1 and new.pop().startswith("kernels-")

    source.write_text(text)
    assert build(source_tree).returncode == 0
    assert [library.read_bytes() for library in built] == original


def test_a_missing_compiler_is_one_clear_line(source_tree: Path) -> None:
    done = build(source_tree, PATH=str(source_tree / "nothing"))
    assert done.returncode == 1
    want = "trtforge: no C++17 compiler found; install g++ (apt-get install g++) or set CXX"
    assert done.stderr.strip().splitlines()[-1] == want


def test_a_compiler_error_is_shown(source_tree: Path) -> None:
    (source_tree / "plugins" / "cpu" / "kernels.cpp").write_text("int main() { return not_declared; }\n")
    done = build(source_tree)
    assert done.returncode == 1 and "not_declared" in done.stderr
    assert not list(source_tree.glob("out/**/*.so"))
