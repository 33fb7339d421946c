"""Linears of one input become one: Q, K and V, and gate and up. Fewer and larger products read memory better.

Their weights lie one after the other, by rows, and a Split gives each its own result. Only linears with the same
attributes are joined, all with a bias or none. Quantized ones are not: targets fuse more around them.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir


def fuse_projections(graph: ir.Model) -> ir.Model:
    """The graph with neighbouring linears of one input joined."""
    model = graph.clone()
    linears = [node for node in model.graph if node.op_type == "Gemm"]
    for _, group in groupby(linears, key=_signature):
        nodes = list(group)
        if len(nodes) > 1:
            _join(model.graph, nodes)
    return model


def _signature(node: ir.Node) -> tuple[object, ...]:
    """Equal for linears that can be one."""
    x, *weights = node.inputs
    attributes = {name: a.value for name, a in node.attributes.items()}
    formats = [
        (v.dtype, list(v.shape or ())[1:], v if _is_shared(v) else None) for v in weights if v is not None
    ]
    return id(x), attributes, formats


def _is_shared(value: ir.Value) -> bool:
    """Whether it is a constant such as the zero that stands for no bias, which joined linears share too."""
    return value.shape is not None and all(d == 1 for d in value.shape)


def _join(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """One linear and a Split in the place of the first node; the outputs keep their names."""
    name = _joined([node.name or "" for node in nodes])
    inputs = [nodes[0].inputs[0]]
    for first, *others in zip(*(node.inputs[1:] for node in nodes), strict=True):
        assert first is not None
        inputs.append(first if _is_shared(first) else _stack(graph, [first, *others]))
    outputs = [node.outputs[0] for node in nodes]
    widths = [_dims(o)[1] for o in outputs]
    whole = ir.Value(name=name, type=outputs[0].type, shape=ir.Shape([_dims(outputs[0])[0], sum(widths)]))
    linear = ir.Node(
        nodes[0].domain,
        nodes[0].op_type,
        inputs,
        list(nodes[0].attributes.values()),
        outputs=[whole],
        version=nodes[0].version,
        name=name,
    )
    sizes = _initializer(graph, f"{name}.widths", ir.tensor(np.array(widths, np.int64)))
    split = ir.Node(
        "",
        "Split",
        [whole, sizes],
        [ir.AttrInt64("axis", 1)],
        outputs=[ir.Value(name=o.name, type=o.type, shape=o.shape) for o in outputs],
        name=f"{name}.split",
    )
    old_weights = [v for node in nodes for v in node.inputs[1:] if v is not None and not _is_shared(v)]
    ir.convenience.replace_nodes_and_values(graph, nodes[0], nodes, [linear, split], outputs, split.outputs)
    for value in old_weights:
        assert not value.uses() and value.name
        del graph.initializers[value.name]


def _joined(names: Sequence[str]) -> str:
    """layers.0.attention.q.weight and its like, .k., .v. -> layers.0.attention.q+k+v.weight"""
    parts = [name.split(".") for name in names]
    return ".".join("+".join(dict.fromkeys(words)) for words in zip(*parts, strict=True))


def _stack(graph: ir.Graph, parts: Sequence[ir.Value | None]) -> ir.Value:
    """An initializer of the parts' rows, one part after the other; read when it is used."""
    values = [p for p in parts if p is not None]
    tensors = [v.const_value for v in values if v.const_value is not None]
    assert len(tensors) == len(parts)
    name = _joined([v.name or "" for v in values])
    rows = sum(_dims(v)[0] for v in values)
    tensor = ir.LazyTensor(
        partial(_concatenate, tensors),
        dtype=tensors[0].dtype,
        shape=ir.Shape([rows, *_dims(values[0])[1:]]),
        name=name,
    )
    return _initializer(graph, name, tensor)


def _concatenate(tensors: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate([t.numpy() for t in tensors]), dtype=tensors[0].dtype)


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape([int(d) for d in tensor.shape])  # type: ignore[arg-type]
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _dims(value: ir.Value) -> list[Any]:
    assert value.shape is not None, value.name
    return list(value.shape)
