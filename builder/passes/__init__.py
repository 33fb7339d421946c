"""Passes: pure functions from graph to graph, run in the listed order; the graph's rules are checked between them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trtforge.builder.passes import fuse_projections, quantize, verify
from trtforge.builder.spec import QuantSpec

if TYPE_CHECKING:
    import onnx_ir as ir


def passes(quant: QuantSpec, activations: str) -> list[tuple[str, Callable[["ir.Model"], "ir.Model"]]]:
    """What is done to the plain graph, in order."""
    return [
        ("quantize", partial(quantize.quantize, quant=quant, activations=activations)),
        ("fuse_projections", fuse_projections.fuse_projections),
    ]


def run_passes(graph: "ir.Model", quant: QuantSpec, activations: str = "fp32") -> "ir.Model":
    """The plain graph (builder/graph.py) after all passes of a recipe. Raises GraphError after the pass at fault.

    activations: int8 or fp32, what quantized linears compute with.
    """
    verify.verify(graph, after="the graph was written")
    for name, rewrite in passes(quant, activations):
        graph = rewrite(graph)
        verify.verify(graph, after=f"pass {name}")
    return graph
