"""The repository as the tests of its shape see it: which files are ours, and what they import."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("builder", "plugins", "runtime", "model_repo")


@cache
def files() -> tuple[Path, ...]:
    """All files of the project, relative to its root: what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    return tuple(sorted(Path(name) for name in listed if name and (ROOT / name).is_file()))


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
