"""For the CPU target: a graph whose linears are all quantized becomes PackedEmbedding, PackedLayers, PackedHead.

That chain is what the native host runs. It is all or nothing: a graph with anything else in it is OpenVINO's, and there
single ops serve as well.
"""

from itertools import pairwise

import onnx_ir as ir

from trtforge.builder.passes.fuse_layers import fuse_layers, is_none, norm_names, number
from trtforge.plugins.cpu.ops import PACKED_EMBEDDING, PACKED_HEAD


def fuse_decoder(graph: ir.Model) -> ir.Model | None:
    """The lowered and packed graph as that chain, or None if it cannot be one."""
    model = graph.clone()
    fuse_layers(model.graph)
    _fuse_embedding(model.graph)
    _fuse_head(model.graph)
    if not _is_chain(model.graph):
        return None
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]
    return model


def unquantized(graph: ir.Model) -> list[str]:
    """The linears, and the lookup, of a packed graph that keep it from becoming the chain."""
    return [
        n.name or ""
        for n in graph.graph
        if n.op_type == "Gemm" or (n.op_type, n.name) == ("Gather", "embedding")
    ]


def _is_chain(graph: ir.Graph) -> bool:
    nodes = list(graph)
    wanted = ["PackedEmbedding", *["PackedLayer"] * (len(nodes) - 2), "PackedHead"]
    if [n.op_type for n in nodes] != wanted:
        return False
    return all(node.inputs[0] is before.outputs[0] for before, node in pairwise(nodes))


def _named(graph: ir.Graph) -> dict[str, ir.Node]:
    """The nodes outside of layers."""
    return {n.name: n for n in graph if n.name and not n.name.startswith("layers.")}


def _fuse_embedding(graph: ir.Graph) -> None:
    """The lookup and the number that its rows are multiplied by."""
    nodes = _named(graph)
    lookup, scaled = nodes["embedding"], nodes.get("embedding.scaled")
    if lookup.op_type != "PackedEmbedding" or scaled is None:
        return
    inputs = _ports(lookup, "token_ids", "weights")
    attributes = _attributes(lookup) | {"scale": number(scaled.inputs[1])}
    node = PACKED_EMBEDDING.node(inputs, attributes, [scaled.outputs[0].name or ""], "embedding")
    ir.convenience.replace_nodes_and_values(
        graph, scaled, [lookup, scaled], [node], scaled.outputs, node.outputs
    )


def _fuse_head(graph: ir.Graph) -> None:
    """Rows, norm, linear and softcap."""
    nodes = _named(graph)
    linear = nodes["lm_head"]
    if linear.op_type != "PackedLinear" or not is_none(_value(linear.inputs[2])):
        return
    names = ["logit_rows.hidden", *norm_names("norm"), "lm_head"]
    attributes = _attributes(linear) | {"epsilon": number(nodes["norm.add"].inputs[1])}
    if "lm_head.capped" in nodes:
        names += ["lm_head.uncapped", "lm_head.tanh", "lm_head.capped"]
        attributes["softcap"] = number(nodes["lm_head.uncapped"].inputs[1])
    rows, last = nodes["logit_rows.hidden"], nodes[names[-1]]
    inputs = {
        **_ports(rows, "x", "logit_rows"),
        "norm": _value(nodes["norm"].inputs[1]),
        "weights": _value(linear.inputs[1]),
    }
    head = PACKED_HEAD.node(inputs, attributes, [last.outputs[0].name or ""], "lm_head")
    ir.convenience.replace_nodes_and_values(
        graph, last, [nodes[name] for name in names], [head], last.outputs, head.outputs
    )


def _ports(node: ir.Node, *names: str) -> dict[str, ir.Value]:
    return {name: _value(value) for name, value in zip(names, node.inputs, strict=True)}


def _value(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _attributes(node: ir.Node) -> dict[str, int | float | str]:
    return {name: a.value for name, a in node.attributes.items()}
