"""The rules that a graph keeps between passes; a pass that breaks one is caught here, at the node where it shows."""

from collections.abc import Iterator

import onnx_ir as ir

from trtforge.plugins import DOMAIN, OPS
from trtforge.plugins.errors import ForgeError, InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.plugins.opdef import ACTIVATION, KV_POOL, Port


class GraphError(ForgeError):
    """A graph that breaks a rule: our fault. The message names the node or value, the rule, and after what."""


def verify(graph: ir.Model, after: str) -> None:
    """Raise GraphError for the first rule that is broken. after: what was done last, for the message."""
    for fault in _faults(graph):
        raise GraphError(f"graph is broken after {after}: {fault}")


def _faults(model: ir.Model) -> Iterator[str]:
    yield from _names(model.graph)
    yield from _edges(model.graph)
    for node in model.graph:
        if node.domain == DOMAIN:
            yield from _plugin_node(node, model)
        elif node.domain != "":
            yield f"node {node.name!r}: domain {node.domain!r} is neither ONNX's nor ours"


def _names(graph: ir.Graph) -> Iterator[str]:
    """Every node and every value has a name of its own."""
    seen: set[str] = set()
    for node in graph:
        if not node.name:
            yield f"a node of type {node.op_type} has no name"
        elif node.name in seen:
            yield f"two nodes are named {node.name!r}"
        seen.add(node.name or "")
    values = [*graph.inputs, *graph.initializers.values(), *(o for n in graph for o in n.outputs)]
    seen = set()
    for value in values:
        if not value.name:
            yield f"an output of node {_producer(value)!r} has no name"
        elif value.name in seen:
            yield f"two values are named {value.name!r}"
        seen.add(value.name or "")


def _edges(graph: ir.Graph) -> Iterator[str]:
    """Values are made before they are used, and none is made or read in for nothing."""
    made = {id(v) for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        for i, value in enumerate(node.inputs):
            if value is not None and id(value) not in made:
                yield f"node {node.name!r}: input {i} ({value.name!r}) is not made before it"
        made |= {id(v) for v in node.outputs}
    for value in graph.outputs:
        if id(value) not in made:
            yield f"output {value.name!r} is made by no node"
    outputs = {id(v) for v in graph.outputs}
    for what, values in (("input", graph.inputs), ("initializer", graph.initializers.values())):
        for value in values:
            if not value.uses():
                yield f"{what} {value.name!r} is used by no node"
    for node in graph:
        for value in node.outputs:
            if not value.uses() and id(value) not in outputs:
                yield f"node {node.name!r}: its output {value.name!r} is used by no node"


def _plugin_node(node: ir.Node, model: ir.Model) -> Iterator[str]:
    """A node of ours is as its declaration says, and the model has the op's definition."""
    at = f"node {node.name!r}"
    op = OPS.get(node.op_type)
    if op is None:
        yield f"{at}: there is no op {node.op_type!r}"
        return
    if (DOMAIN, op.name, "") not in model.functions:
        yield f"{at}: the model has no function body for {op.name}"
    try:
        attributes = op.complete({k: a.value for k, a in node.attributes.items()})
    except InvalidArgument as e:
        yield f"{at}: {e}"
        return
    kv_dtype = str(attributes.get("kv_dtype", "fp32"))
    inputs, outputs = op.ports(kv_dtype)
    for side, ports, values in (("inputs", inputs, node.inputs), ("outputs", outputs, node.outputs)):
        if len(ports) != len(values):
            yield f"{at}: {len(values)} {side}, want {len(ports)} for kv_dtype={kv_dtype}"
            return
        for port, value in zip(ports, values, strict=True):
            yield from (f"{at}: {port.name} {fault}" for fault in _port(port, value, kv_dtype))
    shapes = {
        port.name: None if value is None or value.shape is None else tuple(value.shape)
        for port, value in zip(inputs, node.inputs, strict=True)
    }
    try:
        op.bind(shapes, attributes)
    except InvalidArgument as e:
        yield f"{at}: {e}"


def _port(port: Port, value: ir.Value | None, kv_dtype: str) -> Iterator[str]:
    if value is None:
        yield "is missing"
        return
    if value.dtype is None or value.shape is None:
        yield f"({value.name!r}) has no type or no shape"
        return
    if not port.accepts(value.dtype.name, kv_dtype):
        want = {ACTIVATION: "a float type", KV_POOL: KV_DTYPES[kv_dtype].onnx}.get(port.dtype, port.dtype)
        yield f"({value.name!r}) is {value.dtype.name}, want {want}"


def _producer(value: ir.Value) -> str | None:
    node = value.producer()
    return node.name if node else None
