"""Weight-only quantization: each linear's weight becomes integers with scales.

The pattern, which OpenVINO's ONNX frontend keeps compressed in the IR's file and at run time (FullyConnected with
integer weights; Gather with them for a tied embedding; checked on 2026.4.1) and ONNX Runtime computes as written:

    q [out, in] INT8,  scale FP32 [out]                            -> DequantizeLinear(axis=0)
    q [out, in] INT4,  scale FP32 [out, in/G]                      -> DequantizeLinear(axis=1, block_size=G)
    q [out, in] UINT4, scale FP32, zero_point UINT4 [out, in/G]    -> the same with three inputs

and its output w [out, in] takes the weight's place in the Gemm. (A DequantizeLinear and a MatMul of INT8 weights
are no alternative: ONNX Runtime quantizes the activations of those by itself.)

The output head decides the token: it keeps eight bits per channel under int4 weights, and so does a linear whose
input no group size divides. A tied embedding has them under every recipe, since OpenVINO gathers from groups only
after it has decompressed them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from trtforge.builder.spec import QuantSpec

Array = NDArray[Any]

#: Tried from the largest that the recipe allows.
GROUP_SIZES = (128, 64, 32)

#: Weights are quantized this many at a time, to keep temporary arrays small.
_SLAB = 1 << 20

_EMBEDDING, _HEAD = "embedding.weight", "lm_head.weight"


@dataclass(frozen=True)
class Scheme:
    """How one weight is stored. group_size: columns that share a scale; 0: all of a row."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def dtype(self) -> ir.DataType:
        return ir.DataType[f"{'' if self.symmetric else 'U'}INT{self.bits}"]

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, columns // self.group_size) if self.group_size else (rows,)


INT8_PER_CHANNEL = Scheme(8, 0, True)


def quantize(graph: ir.Model, quant: QuantSpec) -> ir.Model:
    """The graph with every linear's weight as the recipe stores it; still lazy, tensor by tensor, when it is saved."""
    if quant.weights == "none":
        return graph
    model = graph.clone()
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "Gemm" else None
        if weight is None or not weight.is_initializer() or node.name in quant.exclude:
            continue
        assert weight.name is not None and weight.const_value is not None and weight.shape is not None
        scheme = scheme_of(quant, weight.name, int(weight.shape[1]))  # type: ignore[arg-type]
        _replace(model.graph, weight, weight.const_value, scheme)
    return model


def scheme_of(quant: QuantSpec, name: str, columns: int) -> Scheme:
    """How a recipe stores the weight `name` of `columns` inputs."""
    bits = {"int8": 8, "int4": 4}[quant.weights]
    if name == _EMBEDDING or (bits == 4 and name == _HEAD):
        return INT8_PER_CHANNEL
    if not quant.group_size:
        return Scheme(bits, 0, quant.symmetric)
    fitting = [g for g in (quant.group_size, *GROUP_SIZES) if g <= quant.group_size and columns % g == 0]
    return Scheme(bits, max(fitting), quant.symmetric) if fitting else INT8_PER_CHANNEL


def quantize_array(weight: NDArray[np.float32], scheme: Scheme) -> tuple[Array, Array, Array | None]:
    """(q [out, in], scale FP32, zero_point or None) of a weight [out, in]; w is about (q - zero_point) * scale."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, scheme.group_size or columns)
    levels = 2**scheme.bits - 1
    if scheme.symmetric:
        largest = np.abs(groups).max(-1, keepdims=True)
        low, high, zero = -(levels // 2), levels // 2, np.zeros_like(largest)
        scale = largest / high
    else:
        # zero itself must be exact: the range always holds it
        least, most = (
            np.minimum(groups.min(-1, keepdims=True), 0),
            np.maximum(groups.max(-1, keepdims=True), 0),
        )
        low, high = 0, levels
        scale = (most - least) / levels
        zero = np.rint(-least / _nonzero(scale)).clip(low, high)
    scale = _nonzero(scale.astype(np.float32))
    q = (np.rint(groups / scale) + zero).clip(low, high)
    shape = scheme.scale_shape(rows, columns)
    numpy_type = _numpy_type(scheme)
    zero_point = None if scheme.symmetric else zero.reshape(shape).astype(numpy_type)
    return q.reshape(rows, columns).astype(numpy_type), scale.reshape(shape), zero_point


def _nonzero(scale: Array) -> Array:
    """A group of zeros has the scale 1."""
    return np.where(scale == 0, np.ones_like(scale), scale)


def _numpy_type(scheme: Scheme) -> Any:
    return {
        ir.DataType.INT8: np.int8,
        ir.DataType.UINT8: np.uint8,
        ir.DataType.INT4: ml_dtypes.int4,
        ir.DataType.UINT4: ml_dtypes.uint4,
    }[scheme.dtype]


class _Lazy:
    """One weight, quantized when a part of it is asked for. Its small parts are kept, the integers are not."""

    def __init__(self, weight: ir.TensorProtocol, scheme: Scheme) -> None:
        self._weight, self._scheme = weight, scheme
        self._small: tuple[Array, Array | None] | None = None

    def integers(self) -> ir.TensorProtocol:
        weight = self._weight.numpy()
        rows = max(1, _SLAB // weight.shape[1])
        slabs = [quantize_array(weight[i : i + rows], self._scheme) for i in range(0, len(weight), rows)]
        zero_points = [z for _, _, z in slabs if z is not None]
        scale = np.concatenate([s for _, s, _ in slabs])
        self._small = (scale, np.concatenate(zero_points) if zero_points else None)
        return ir.tensor(np.concatenate([q for q, _, _ in slabs]), dtype=self._scheme.dtype)

    def scale(self) -> ir.TensorProtocol:
        return ir.tensor(self._parts()[0])

    def zero_point(self) -> ir.TensorProtocol:
        zero_point = self._parts()[1]
        assert zero_point is not None
        return ir.tensor(zero_point, dtype=self._scheme.dtype)

    def _parts(self) -> tuple[Array, Array | None]:
        if self._small is None:
            self.integers()
        assert self._small is not None
        return self._small


def _replace(graph: ir.Graph, weight: ir.Value, tensor: ir.TensorProtocol, scheme: Scheme) -> None:
    """Put DequantizeLinear of lazily quantized initializers in the place of an FP32 one, for all its users."""
    name = weight.name
    assert name is not None
    rows, columns = (int(d) for d in tensor.shape)  # type: ignore[arg-type]
    lazy, scale_shape = _Lazy(tensor, scheme), scheme.scale_shape(rows, columns)
    users = [use.node for use in weight.uses()]
    inputs = [
        _initializer(name, lazy.integers, scheme.dtype, (rows, columns)),
        _initializer(f"{name}.scale", lazy.scale, ir.DataType.FLOAT, scale_shape),
    ]
    if not scheme.symmetric:
        inputs.append(_initializer(f"{name}.zero_point", lazy.zero_point, scheme.dtype, scale_shape))
    attributes = [ir.AttrInt64("axis", 1 if scheme.group_size else 0)]
    if scheme.group_size:
        attributes.append(ir.AttrInt64("block_size", scheme.group_size))
    output = ir.Value(
        name=f"{name}.dequantized", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([rows, columns])
    )
    node = ir.Node("", "DequantizeLinear", inputs, attributes, outputs=[output], name=output.name)
    weight.replace_all_uses_with(output)
    del graph.initializers[name]
    for value in inputs:
        graph.register_initializer(value)
    graph.insert_before(min(users, key=lambda n: _position(graph, n)), node)


def _position(graph: ir.Graph, node: ir.Node) -> int:
    return next(i for i, n in enumerate(graph) if n is node)


def _initializer(
    name: str, make: Callable[[], ir.TensorProtocol], dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    tensor = ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
