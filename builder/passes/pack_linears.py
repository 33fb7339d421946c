"""For the CPU target: weights of QuantLinear and QuantEmbedding in the layout that its kernels read.

A linear's codes, scales and minimums become one tensor of bytes (trtforge.plugins.cpu.packing), packed when the graph
is saved; a tied embedding and its head share it.
"""

from functools import partial

import numpy as np
import onnx_ir as ir

from trtforge.plugins.cpu.ops import CPU_OPS
from trtforge.plugins.cpu.packing import PackedLayout, pack, packed_layout

_PACKED = {"QuantLinear": "PackedLinear", "QuantEmbedding": "PackedEmbedding"}


def pack_linears(graph: ir.Model) -> ir.Model:
    """The graph with PackedLinear and PackedEmbedding in the place of the plain ops."""
    model = graph.clone()
    for node in list(model.graph):
        if node.op_type in _PACKED:
            _pack(model.graph, node)
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]
    return model


def _pack(graph: ir.Graph, node: ir.Node) -> None:
    first, codes, scales, minimums, *bias = (value for value in node.inputs if value is not None)
    layout = _layout(codes, scales, minimums, node.attributes["group_size"].as_int())
    weights = _packed(graph, layout, codes, scales, minimums)
    op = CPU_OPS[_PACKED[node.op_type]]
    inputs = dict(zip((port.name for port in op.inputs), [first, weights, *bias], strict=True))
    bits = node.attributes["activation_bits"].as_int() if "activation_bits" in node.attributes else 32
    values = layout.attributes(bits)
    attributes = {a.name: values[a.name] for a in op.attributes if a.name in values}
    new = op.node(inputs, attributes, [o.name or "" for o in node.outputs], node.name)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)


def _layout(codes: ir.Value, scales: ir.Value, minimums: ir.Value, group_size: int) -> PackedLayout:
    assert codes.shape is not None and codes.dtype is not None and scales.dtype is not None
    rows, columns = (int(d) for d in codes.shape)  # type: ignore[arg-type]
    has_minimums = minimums.shape == scales.shape
    return packed_layout((rows, columns), codes.dtype.name, group_size, scales.dtype.name, has_minimums)


def _packed(
    graph: ir.Graph, layout: PackedLayout, codes: ir.Value, scales: ir.Value, minimums: ir.Value
) -> ir.Value:
    """The packed weights of these codes, made once for all who have them."""
    assert codes.name is not None
    name = codes.name.removesuffix(".codes") + ".packed"
    if name not in graph.initializers:
        values = [codes, scales, minimums] if layout.has_minimums else [codes, scales]
        parts = [v.const_value for v in values if v.const_value is not None]
        tensor = ir.LazyTensor(
            partial(_make, layout, parts), dtype=ir.DataType.UINT8, shape=ir.Shape(layout.shape), name=name
        )
        graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        )
    return graph.initializers[name]


def _make(layout: PackedLayout, parts: list[ir.TensorProtocol]) -> ir.TensorProtocol:
    packed: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = pack(layout, *(p.numpy() for p in parts))
    return ir.tensor(packed)
