"""The repository as the tests of its shape see it: which files are ours, and what they import."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("builder", "plugins", "runtime", "model_repo")


def _listed(*options: str) -> set[Path]:
    command = ["git", "ls-files", "-z", *options]
    run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {Path(name) for name in run.stdout.split("\0") if name and (ROOT / name).is_file()}


@cache
def files() -> tuple[Path, ...]:
    """All files of the project, relative to its root: those that git tracks, and new ones in the same folders.

    What somebody else put beside them, an engine for example, is not the project's.
    """
    tracked = _listed("--cached")
    folders = {file.parts[0] for file in tracked if len(file.parts) > 1}
    new = {file for file in _listed("--others", "--exclude-standard") if file.parts[0] in folders}
    return tuple(sorted(tracked | new))


def modules() -> tuple[Path, ...]:
    """The Python modules of the four parts."""
    return tuple(f for f in files() if f.suffix == ".py" and f.parts[0] in PARTS)


def dotted(module: Path) -> str:
    """`builder/checkpoint/gguf.py` -> `trtforge.builder.checkpoint.gguf`."""
    parts = module.with_suffix("").parts
    return ".".join(("trtforge", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(module: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports anywhere, also inside functions, absolute, with its line.

    `from a import b` gives both `a` and `a.b`, since b may be a module.
    """
    package = dotted(module).split(".")
    if module.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield name, node.lineno
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)
