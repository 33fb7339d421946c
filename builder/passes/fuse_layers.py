"""For the CPU target: each decoder layer whose linears are all quantized becomes one PackedLayer.

Layers are found by the names that builder/graph.py gives (`layers.3.attention.q`). One that has anything else in it
(norms of heads or after blocks, biases in its MLP, a linear that is not quantized) stays as it is.
"""

from collections.abc import Mapping

import onnx_ir as ir

from trtforge.plugins.cpu.ops import PACKED_LAYER

_NORM = ("square", "mean", "add", "root", "reciprocal", "scaled")
_ATTENTION = ("q", "k", "v", "kv_cache_update", "paged_attention", "o", "residual")
_MLP = ("gate", "up", "gated", "down", "residual")
_GATES = {"silu": ("sigmoid", "silu"), "gelu_tanh": ("gelu",)}
_LINEARS = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}

#: One layer's nodes by their names within it: `attention.q`.
Layer = Mapping[str, ir.Node]


def fuse_layers(graph: ir.Model) -> ir.Model:
    """The lowered graph with a PackedLayer in the place of each layer that can be one."""
    model = graph.clone()
    layers: dict[str, dict[str, ir.Node]] = {}
    for node in model.graph:
        prefix, _, rest = (node.name or "").partition(".")
        if prefix == "layers":
            index, _, name = rest.partition(".")
            layers.setdefault(index, {})[name] = node
    for index, nodes in layers.items():
        if (activation := _activation(nodes)) and _is_packed(nodes):
            _fuse(model.graph, f"layers.{index}", nodes, activation)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]
    return model


def _activation(nodes: Layer) -> str | None:
    """The MLP's activation, if the layer is made of just these nodes."""
    norms = {f"{block}.norm{part}" for block in _LINEARS for part in ("", *(f".{p}" for p in _NORM))}
    for activation, gate in _GATES.items():
        names = {f"attention.{n}" for n in _ATTENTION} | {f"mlp.{n}" for n in (*_MLP, *gate)}
        if nodes.keys() == names | norms:
            return activation
    return None


def _is_packed(nodes: Layer) -> bool:
    linears = [nodes[f"{block}.{name}"] for block, names in _LINEARS.items() for name in names]
    if any(n.op_type != "PackedLinear" for n in linears):
        return False
    biased = any(_is_bias(nodes[f"mlp.{name}"].inputs[2]) for name in _LINEARS["mlp"])
    return not biased and len({_int(n, "activation_bits") for n in linears}) == 1


def _is_bias(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and value.shape[0] != 1


def _fuse(graph: ir.Graph, name: str, nodes: Layer, activation: str) -> None:
    update, attention = nodes["attention.kv_cache_update"], nodes["attention.paged_attention"]
    inputs = {
        "x": nodes["attention.norm.square"].inputs[0],
        "attention_norm": nodes["attention.norm"].inputs[1],
        "mlp_norm": nodes["mlp.norm"].inputs[1],
        "cos_sin": update.inputs[3],
        "slot_mapping": update.inputs[4],
        **dict(zip(("kv_pool", "kv_scales"), update.inputs[5:], strict=False)),
        **dict(
            zip(
                ("positions", "query_start", "kv_lengths", "block_tables"), attention.inputs[-4:], strict=True
            )
        ),
    }
    attributes: dict[str, int | float | str] = {k: a.value for k, a in attention.attributes.items()}
    for block, linears in _LINEARS.items():
        for linear in linears:
            node = nodes[f"{block}.{linear}"]
            inputs[f"{linear}_weights"] = node.inputs[1]
            attributes[f"{linear}_format"] = _format(node)
            if block == "attention":
                inputs[f"{linear}_bias"] = node.inputs[2]
    gate = nodes["mlp.gate"]
    attributes |= {
        "hidden_size": _int(gate, "in_features"),
        "intermediate_size": _int(gate, "out_features"),
        "activation": activation,
        "epsilon": _epsilon(nodes["attention.norm.add"]),
        "activation_bits": _int(gate, "activation_bits"),
    }
    last = nodes["mlp.residual"]
    given = {port: value for port, value in inputs.items() if value is not None}
    layer = PACKED_LAYER.node(given, attributes, [last.outputs[0].name or ""], name)
    ir.convenience.replace_nodes_and_values(
        graph, last, list(nodes.values()), [layer], last.outputs, layer.outputs
    )


def _format(linear: ir.Node) -> str:
    """As PackedLayout.format."""
    names = ("bits", "zero_point", "group_size", "scale_bits", "has_minimums")
    return " ".join(str(_int(linear, name)) for name in names)


def _int(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int()


def _epsilon(add: ir.Node) -> float:
    value = add.inputs[1]
    assert value is not None and value.const_value is not None
    return float(value.const_value.numpy())
