"""Quantization: a linear with quantized weights becomes a QuantLinear, and the lookup in such a table a QuantEmbedding.

A recipe says how weights are rounded (int8, int4), or that they stay as the checkpoint has them (as_is): then codes,
scales and minimums pass through untouched, and what is stored as values stays so.

The output head decides the token: under int4 weights it keeps eight bits per channel. A linear whose input is no
multiple of 32 stays as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks, format_of, round_to_blocks
from trtforge.builder.graph import StoredTensor
from trtforge.builder.spec import QuantSpec
from trtforge.plugins import OPS

_NUMPY = {"INT4": ml_dtypes.int4, "UINT4": ml_dtypes.uint4, "INT8": np.int8, "UINT8": np.uint8}

Array = NDArray[Any]


def quantize(graph: ir.Model, quant: QuantSpec, activations: str) -> ir.Model:
    """The graph with the recipe's weights; still lazy, tensor by tensor, when it is saved.

    activations: int8 or fp32, what the products of quantized weights take.
    """
    if quant.weights == "none":
        return graph
    model = graph.clone()
    for weight in list(model.graph.initializers.values()):
        fmt = _format(quant, weight) if _is_chosen(quant, weight) else None
        if fmt is not None:
            _replace(model.graph, weight, fmt, {"int8": 8, "fp32": 32}[activations])
    return model


def remarks(graph: ir.Model, quant: QuantSpec) -> Iterator[str]:
    """For people: which weights of the plain graph a recipe does not take as its name says."""
    rounded: dict[str, list[str]] = {}
    kept = []
    for weight in graph.graph.initializers.values():
        if quant.weights == "none" or not _is_chosen(quant, weight):
            continue
        tensor, fmt = weight.const_value, _format(quant, weight)
        stored = tensor.format if isinstance(tensor, StoredTensor) else None
        if fmt is None and (stored or quant.weights != "as_is"):
            kept.append(weight.name or "")
        elif fmt and not fmt.exact and quant.weights == "as_is" and isinstance(tensor, StoredTensor):
            rounded.setdefault(f"{tensor.stored_type}: rounded once more, to {fmt}", []).append(
                weight.name or ""
            )
    for what, names in rounded.items():
        yield f"{len(names)} weights are stored as {what}: {_some(names)}"
    if kept:
        yield f"{len(kept)} weights stay in fp32, since their inputs are no multiple of 32: {_some(kept)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_chosen(quant: QuantSpec, weight: ir.Value) -> bool:
    """Whether it is a table of linears that the recipe does not exclude, or the embedding."""
    users = [use.node for use in weight.uses()]
    if not all(_is_table(node, weight) for node in users):
        return False
    linears = [node.name for node in users if node.op_type == "Gemm"]
    return not any(name in quant.exclude for name in linears)


def _format(quant: QuantSpec, weight: ir.Value) -> BlockFormat | None:
    assert weight.name and weight.shape is not None
    tensor = weight.const_value
    stored = tensor.format if isinstance(tensor, StoredTensor) else None
    return format_of(quant, weight.name, int(weight.shape[1]), stored)  # type: ignore[arg-type]


class _Lazy:
    """One weight's blocks, made when a part of them is asked for. The codes are not kept, and of the small parts each
    until it is asked for: codes, scales and minimums, in this order, cost one read."""

    def __init__(self, tensor: ir.TensorProtocol, fmt: BlockFormat) -> None:
        self._tensor, self._format = tensor, fmt
        self._waiting: dict[str, Array] = {}

    def part(self, name: str) -> ir.TensorProtocol:
        if name not in self._waiting:
            blocks = self._blocks()
            parts = {"codes": blocks.codes, "scales": blocks.scales, "minimums": blocks.minimums}
            self._waiting = {k: v for k, v in parts.items() if v is not None}
        part = self._waiting.pop(name)
        self._waiting.pop("codes", None)
        if name != "codes":
            return ir.tensor(part)
        code_type = self._format.code_type
        return ir.tensor(part.astype(_NUMPY[code_type]), dtype=ir.DataType[code_type])

    def _blocks(self) -> Blocks:
        if isinstance(self._tensor, StoredTensor) and self._tensor.format == self._format:
            return self._tensor.read_blocks()
        return round_to_blocks(self._tensor.numpy(), self._format)


def _is_table(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node has the value for the weight of a linear, or looks its rows up."""
    place = {"Gemm": 1, "Gather": 0}.get(node.op_type)
    return place is not None and value.is_initializer() and node.inputs[place] is value


def _replace(graph: ir.Graph, weight: ir.Value, fmt: BlockFormat, activation_bits: int) -> None:
    """Put lazily made blocks in the place of an FP32 initializer, and our ops in that of all its users."""
    assert weight.name is not None and weight.const_value is not None and weight.shape is not None
    rows, columns = (int(d) for d in weight.shape)  # type: ignore[arg-type]
    lazy, small = _Lazy(weight.const_value, fmt), (rows, fmt.num_groups(columns))
    parts = {"codes": (fmt.code_type, (rows, columns)), "scales": (fmt.scale_type, small)}
    if not fmt.symmetric:
        parts["minimums"] = (fmt.scale_type, small)
    blocks = {
        part: _initializer(
            graph, f"{weight.name}.{part}", partial(lazy.part, part), ir.DataType[dtype], shape
        )
        for part, (dtype, shape) in parts.items()
    }
    if fmt.symmetric:
        zero = np.zeros((1, 1), {"FLOAT": np.float32, "FLOAT16": np.float16}[fmt.scale_type])
        blocks["minimums"] = _constant(graph, f"no_minimums.{zero.dtype}", zero)
    group_size = fmt.group_size or columns
    for use in list(weight.uses()):
        node = use.node
        if node.op_type == "Gather":
            inputs = {"token_ids": node.inputs[1], **blocks}
            new = _node("QuantEmbedding", node, inputs, {"group_size": group_size})
        else:
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            bias = bias or _constant(graph, "no_bias", np.zeros(1, np.float32))
            inputs = {"x": node.inputs[0], **blocks, "bias": bias}
            attributes = {"group_size": group_size, "activation_bits": activation_bits}
            new = _node("QuantLinear", node, inputs, attributes)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [new], node.outputs, new.outputs)
    del graph.initializers[weight.name]


def _node(
    op: str, old: ir.Node, inputs: Mapping[str, ir.Value | None], attributes: Mapping[str, int]
) -> ir.Node:
    """One of our ops with the name and the outputs' names of the node that it replaces."""
    present = {name: value for name, value in inputs.items() if value is not None}
    return OPS[op].node(present, attributes, [o.name or "" for o in old.outputs], old.name)


def _constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """A small initializer, shared by all who name it."""
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
        )
        graph.register_initializer(value)
    return graph.initializers[name]


def _initializer(
    graph: ir.Graph,
    name: str,
    make: Callable[[], ir.TensorProtocol],
    dtype: ir.DataType,
    shape: tuple[int, ...],
) -> ir.Value:
    tensor = ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
    graph.register_initializer(value)
    return value
