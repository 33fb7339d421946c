"""What is installed: `trtforge.*` and nothing beside it, with every package and every data file."""

import os
import re
import shutil
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


def declared(*extras: str) -> set[str]:
    project = PYPROJECT["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return {re.split(r"[^\w-]", line)[0].replace("_", "-").lower() for line in lines}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    distributions = metadata.packages_distributions()
    imported = {name.split(".")[0] for module in tree.modules() for name, _ in tree.imports(module)}
    third_party = imported - sys.stdlib_module_names - {"trtforge", "triton_python_backend_utils"}
    used = {
        distribution.replace("_", "-").lower()
        for name in third_party
        for distribution in distributions.get(name, [name])
    }
    # protobuf comes with onnx, which fixes its version; pytriton's binary is used, its Python is not.
    assert used - {"protobuf"} <= declared("serve", "pytorch")
    assert declared() - {"tomli"} <= used
    assert declared("serve") - declared() <= used | {"nvidia-pytriton"}


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built the way a package index would have it: a source distribution of our files, and a wheel from that."""
    place = tmp_path_factory.mktemp("package")
    for file in tree.files():
        (place / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree.ROOT / file, place / "tree" / file)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(place)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=place / "tree", capture_output=True, check=True)
    [sdist] = place.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", place, sdist)
    [built] = place.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_trtforge_and_all_of_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"trtforge", "trtforge-0.1.0.dist-info"}
    sources = {f for f in tree.files() if f.parts[0] in tree.PARTS and f.suffix not in (".cpp", ".hpp")}
    assert {n for n in names if n.startswith("trtforge/")} == {
        *(f"trtforge/{f}" for f in sources),
        *(f"trtforge/plugins/cpu/libtrtforge_{name}.so" for name in ("cpu", "host")),
    }
    assert "trtforge-0.1.0.dist-info/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_wheel_works_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    code = (
        "from trtforge.builder import cli, recipes; from trtforge.plugins import cpu; import openvino; "
        "cpu.register(openvino.Core()); print(cli.__file__, *recipes.names())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [
        str(tmp_path / "site" / "trtforge" / "builder" / "cli.py"),
        *(f.stem for f in sorted((tree.ROOT / "builder" / "recipes").glob("*.toml"))),
    ]
