"""Passes: pure functions from graph to graph, run in the listed order; the graph's rules are checked between them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trtforge.builder.passes import quantize, verify
from trtforge.builder.spec import QuantSpec

if TYPE_CHECKING:
    import onnx_ir as ir


def passes(quant: QuantSpec) -> list[tuple[str, Callable[["ir.Model"], "ir.Model"]]]:
    """What a recipe does to the plain graph, in order."""
    return [("quantize", partial(quantize.quantize, quant=quant))]


def run_passes(graph: "ir.Model", quant: QuantSpec) -> "ir.Model":
    """The plain graph (builder/graph.py) after all passes of a recipe. Raises GraphError after the pass at fault."""
    verify.verify(graph, after="the graph was written")
    for name, rewrite in passes(quant):
        graph = rewrite(graph)
        verify.verify(graph, after=f"pass {name}")
    return graph
