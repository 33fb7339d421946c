"""What is installed: `trtforge.*` and nothing beside it, with every package and every data file."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    """A package that is not listed works in an editable install and is missing from the wheel."""
    found = {tree.dotted(module) for module in tree.modules() if module.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_folder_with_modules_is_a_package() -> None:
    templates = tree.Path("model_repo/templates")
    folders = {module.parent for module in tree.modules() if templates not in module.parents}
    assert not [folder for folder in folders if not (tree.ROOT / folder / "__init__.py").is_file()]


def test_no_part_can_be_imported_by_its_bare_name(tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([name for name in {tree.PARTS} if u.find_spec(name)])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_the_version_is_the_installed_one() -> None:
    assert metadata.version("trtforge") == PYPROJECT["project"]["version"]


@pytest.mark.slow
def test_the_wheel_holds_trtforge_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, tree.ROOT],
        check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"trtforge", "trtforge-0.1.0.dist-info"}
    wanted = {
        f"trtforge/{f}" for f in tree.files()
        if f.parts[0] in tree.PARTS and (f.suffix in (".py", ".toml") or f.name == "py.typed")
    }  # fmt: skip
    assert not wanted - set(names)
    assert "trtforge/plugins/cpu/libtrtforge_cpu.so" in names
