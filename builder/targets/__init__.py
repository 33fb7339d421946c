"""Targets: one file each, found by being in this folder (`tensorrt_rtx.py` is the target `tensorrt-rtx`).

A target file defines `compile(graph, directory, progress)`: lower the plain ONNX graph (builder/graph.py,
after the recipe's passes) for its executor and write the engine's files into `directory`. The executor of
the same name in runtime/executors/ opens what it wrote.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from trtforge.plugins.errors import InvalidArgument

if TYPE_CHECKING:
    import onnx_ir as ir

#: progress(what, done, total): called as work advances; done and total in any one unit, e.g. bytes.
Progress = Callable[[str, int, int], None]


#: Targets that the design has and this version does not.
COMING = ("tensorrt", "tensorrt-rtx")


class Target(Protocol):
    def compile(self, graph: "ir.Model", directory: Path, progress: Progress) -> Mapping[str, str]:
        """Write the engine's files into `directory` and give the versions that the executor needs at load."""


def names() -> tuple[str, ...]:
    """All targets, as on the command line."""
    return tuple(sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__)))


def target(name: str) -> Target:
    """The target's module. Raises InvalidArgument that names the choices."""
    name = canonical(name)
    if name not in names():
        raise InvalidArgument(
            f"target {name!r} comes with a later version; choose from: {', '.join(names())} "
            "(`trtforge plan MODEL --gpu NAME` tells what it will need)"
        )
    return cast(Target, importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))


def canonical(name: str) -> str:
    """A target's name, of one to come too, with dashes. Raises InvalidArgument for what is none."""
    name = name.replace("_", "-")
    if name not in (*names(), *COMING):
        raise InvalidArgument(f"target {name!r} is unknown; choose from: {', '.join(names())}")
    return name
