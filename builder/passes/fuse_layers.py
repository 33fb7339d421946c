"""For the CPU target: each decoder layer whose linears are all quantized becomes one PackedLayer.

Layers are found by the names that builder/graph.py gives (`layers.3.attention.q`). One that has anything else in it
stays as it is.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from trtforge.plugins.cpu.ops import PACKED_LAYER

_NORM = ("square", "mean", "add", "root", "reciprocal", "scaled")
_ATTENTION = ("q", "k", "v", "kv_cache_update", "paged_attention", "o", "residual")
_MLP = ("gate", "up", "gated", "down", "residual")
_GATES = {"silu": ("sigmoid", "silu"), "gelu_tanh": ("gelu",)}
_LINEARS = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
#: Norms that not every family has, by the layer's port that takes their weight, with what is around them.
_OPTIONAL_NORMS = {
    "q_norm": ("attention.q_norm", ("split", "joined")),
    "k_norm": ("attention.k_norm", ("split", "joined")),
    "attention_post_norm": ("attention.post_norm", ()),
    "mlp_post_norm": ("mlp.post_norm", ()),
}

#: One layer's nodes by their names within it: `attention.q`.
Layer = Mapping[str, ir.Node]


def fuse_layers(graph: ir.Graph) -> None:
    """Put a PackedLayer in the place of each layer that can be one. The graph is lowered and packed."""
    layers: dict[str, dict[str, ir.Node]] = {}
    for node in graph:
        prefix, _, rest = (node.name or "").partition(".")
        if prefix == "layers":
            index, _, name = rest.partition(".")
            layers.setdefault(index, {})[name] = node
    for index, nodes in layers.items():
        if (activation := _activation(nodes)) and _is_packed(nodes):
            _fuse(graph, f"layers.{index}", nodes, activation)


def norm_names(at: str) -> Iterator[str]:
    """The names of the nodes that an RMS norm consists of; the one of just this name multiplies by the weight."""
    yield at
    yield from (f"{at}.{part}" for part in _NORM)


def weight_format(linear: ir.Node) -> str:
    """Of a PackedLinear, as PackedLayout.format."""
    names = ("bits", "zero_point", "group_size", "scale_bits", "has_minimums")
    return " ".join(str(int_attribute(linear, name)) for name in names)


def int_attribute(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int()


def number(value: ir.Value | None) -> float:
    """A constant of one element, such as a norm's epsilon."""
    assert value is not None and value.const_value is not None
    return float(value.const_value.numpy())


def is_none(value: ir.Value) -> bool:
    """Whether it is the zero [1] that stands for a bias or a norm that the model does not have."""
    return value.shape is not None and tuple(value.shape) == (1,)


def _activation(nodes: Layer) -> str | None:
    """The MLP's activation, if the layer is made of just these nodes."""
    norms = {name for block in _LINEARS for name in norm_names(f"{block}.norm")}
    for at, around in _OPTIONAL_NORMS.values():
        if at in nodes:
            norms |= {*norm_names(at), *(f"{at}.{name}" for name in around)}
    for activation, gate in _GATES.items():
        names = {f"attention.{n}" for n in _ATTENTION} | {f"mlp.{n}" for n in (*_MLP, *gate)}
        if nodes.keys() == names | norms:
            return activation
    return None


def _linears(nodes: Layer) -> Iterator[tuple[str, ir.Node]]:
    for block, names in _LINEARS.items():
        yield from ((name, nodes[f"{block}.{name}"]) for name in names)


def _is_packed(nodes: Layer) -> bool:
    linears = [node for _, node in _linears(nodes)]
    if any(n.op_type != "PackedLinear" for n in linears):
        return False
    return len({int_attribute(n, "activation_bits") for n in linears}) == 1


def _fuse(graph: ir.Graph, name: str, nodes: Layer, activation: str) -> None:
    attention = nodes["attention.paged_attention"]
    attributes: dict[str, int | float | str] = {k: a.value for k, a in attention.attributes.items()}
    attributes |= {f"{n}_format": weight_format(node) for n, node in _linears(nodes)}
    gate = nodes["mlp.gate"]
    attributes |= {
        "hidden_size": int_attribute(gate, "in_features"),
        "intermediate_size": int_attribute(gate, "out_features"),
        "activation": activation,
        "epsilon": number(nodes["attention.norm.add"].inputs[1]),
        "activation_bits": int_attribute(gate, "activation_bits"),
    }
    last = nodes["mlp.residual"]
    given = {port: value for port, value in _inputs(graph, nodes).items() if value is not None}
    layer = PACKED_LAYER.node(given, attributes, [last.outputs[0].name or ""], name)
    ir.convenience.replace_nodes_and_values(
        graph, last, list(nodes.values()), [layer], last.outputs, layer.outputs
    )


def _inputs(graph: ir.Graph, nodes: Layer) -> dict[str, ir.Value | None]:
    update, attention = nodes["attention.kv_cache_update"], nodes["attention.paged_attention"]
    indices = ("positions", "query_start", "kv_lengths", "block_tables")
    return {
        "x": nodes["attention.norm.square"].inputs[0],
        "attention_norm": nodes["attention.norm"].inputs[1],
        "mlp_norm": nodes["mlp.norm"].inputs[1],
        **{
            port: nodes[at].inputs[1] if at in nodes else _none(graph)
            for port, (at, _) in _OPTIONAL_NORMS.items()
        },
        **{f"{name}_weights": node.inputs[1] for name, node in _linears(nodes)},
        **{f"{name}_bias": node.inputs[2] for name, node in _linears(nodes)},
        "cos_sin": update.inputs[3],
        "slot_mapping": update.inputs[4],
        **dict(zip(("kv_pool", "kv_scales"), update.inputs[5:], strict=False)),
        **dict(zip(indices, attention.inputs[-4:], strict=True)),
    }


def _none(graph: ir.Graph) -> ir.Value:
    """The zero [1] in the place of a norm that the model does not have; one for all."""
    name = "no_norm"
    if name not in graph.initializers:
        tensor = ir.tensor(np.zeros(1, np.float32), name=name)
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape([1]), const_value=tensor)
        )
    return graph.initializers[name]
