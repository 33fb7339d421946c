"""OpDef: one declaration per op of ours. Everything else is derived from it.

From the inputs, outputs, attributes, shape rule and body declared here come the ONNX local function (the op's
definition, which ONNX Runtime executes and TensorRT-RTX compiles through), the nodes of a graph, the conversion
to OpenVINO, the checks of the C++ op's attributes, and docs/ops.md.

Importing this module costs nothing: onnx and onnx-ir are loaded by the methods that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtforge.plugins.errors import InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES, KVDtype

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

#: The domain of every op of ours, and its version in a model's opset imports.
DOMAIN = "trtforge"
DOMAIN_VERSION = 1
#: The standard opset that the function bodies are written in.
OPSET = 21

#: Element types of a port beside ONNX's own names: the activations' (any float type), and the pool's carrier.
ACTIVATION = "activation"
KV_POOL = "kv_dtype"

AttributeValue = int | float | str


@dataclass(frozen=True)
class Attribute:
    """A node attribute: name, Python type (int, float or str), what it means; no default: required.

    choices: the only values that it may have; empty: any.
    """

    name: str
    type: type
    doc: str
    default: AttributeValue | None = None
    choices: tuple[AttributeValue, ...] = ()


@dataclass(frozen=True)
class Port:
    """An input or output.

    dtype: an ONNX type name, several (`FLOAT16|FLOAT`), ACTIVATION or KV_POOL. shape: dimensions; each an int, a
    product of attribute names (`num_heads * head_size`), a symbol (`T`) that must mean the same in all ports of a
    node, or a quotient of these. quantized: the port exists for KV dtypes with scales only. broadcast: any dimension
    may be 1 instead.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    doc: str
    quantized: bool = False
    broadcast: bool = False

    def accepts(self, dtype: str, kv_dtype: str = "fp32") -> bool:
        """Whether a value of an ONNX type may be bound to the port, in a node with this KV dtype."""
        if self.dtype == ACTIVATION:
            return dtype in ("FLOAT", "FLOAT16", "BFLOAT16")
        return dtype in (_kv(kv_dtype).onnx if self.dtype == KV_POOL else self.dtype).split("|")


@dataclass(frozen=True)
class OpDef:
    """An op of domain `trtforge`.

    body: gives the statements of the ONNX function body, in ONNX's text syntax, for one KV dtype. All other
    variation is in the node's attributes, so that a model has one function per op. None: an op that only a target's
    lowered graphs have.
    """

    name: str
    doc: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: tuple[Attribute, ...]
    body: Callable[[KVDtype], str] | None

    def ports(self, kv_dtype: str = "fp32") -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """(inputs, outputs) of the op for a KV dtype, in order."""
        scales = _kv(kv_dtype).scales > 0
        return (
            tuple(p for p in self.inputs if scales or not p.quantized),
            tuple(p for p in self.outputs if scales or not p.quantized),
        )

    def function(self, kv_dtype: str = "fp32") -> onnx.FunctionProto:
        """The op's definition as an ONNX local function, for a model whose pools hold `kv_dtype`."""
        import onnx.parser

        return onnx.parser.parse_function(self.function_text(kv_dtype))

    def function_text(self, kv_dtype: str = "fp32") -> str:
        """The function in ONNX's text syntax."""
        assert self.body is not None, self.name
        inputs, outputs = self.ports(kv_dtype)
        return (
            f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
            f"{self.name} <{', '.join(a.name for a in self.attributes)}> "
            f"({', '.join(p.name for p in inputs)}) => ({', '.join(p.name for p in outputs)})\n"
            f"{{\n{self.body(_kv(kv_dtype))}\n}}\n"
        )

    def node(
        self,
        inputs: Mapping[str, ir.Value],
        attributes: Mapping[str, AttributeValue],
        outputs: Sequence[str] | None = None,
        name: str | None = None,
    ) -> ir.Node:
        """An onnx-ir node with checked inputs and attributes, and outputs with types and shapes.

        inputs: by port name, all that the KV dtype needs and no other. attributes: those without a default are
        required. outputs: names for the output values, in order. Raises InvalidArgument that names op and port.
        """
        import onnx_ir as ir

        values = self.complete(attributes)
        kv_dtype = str(values.get("kv_dtype", "fp32"))
        in_ports, out_ports = self.ports(kv_dtype)
        if set(inputs) != {p.name for p in in_ports}:
            raise InvalidArgument(
                f"{self.name}: inputs {sorted(inputs)}, want {[p.name for p in in_ports]}"
                + (f" for kv_dtype={kv_dtype}" if "kv_dtype" in values else "")
            )
        shapes = {k: None if v.shape is None else tuple(v.shape) for k, v in inputs.items()}
        dims = self.bind(shapes, values)
        activation = next((inputs[p.name].type for p in in_ports if p.dtype == ACTIVATION), None)
        made = []
        for i, port in enumerate(out_ports):
            dtype = activation if port.dtype == ACTIVATION else ir.TensorType(self._ir_dtype(port, values))
            shape = ir.Shape([_evaluate(d, values, dims) for d in port.shape])
            made.append(ir.Value(name=outputs[i] if outputs else None, type=dtype, shape=shape))
        node_attributes = [_ir_attribute(a, values[a.name]) for a in self.attributes]
        ordered = [inputs[p.name] for p in in_ports]
        return ir.Node(
            DOMAIN, self.name, ordered, node_attributes, outputs=made, version=DOMAIN_VERSION, name=name
        )

    def complete(self, attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        """The attributes with defaults filled in, in the declared order; raises InvalidArgument."""
        known = {a.name for a in self.attributes}
        if extra := sorted(set(attributes) - known):
            raise InvalidArgument(
                f"{self.name}: no attribute {extra[0]!r}; it has {', '.join(sorted(known))}"
            )
        values: dict[str, AttributeValue] = {}
        for a in self.attributes:
            value = attributes.get(a.name, a.default)
            if value is None:
                raise InvalidArgument(f"{self.name}: attribute {a.name!r} is missing")
            if a.type is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not a.type:
                raise InvalidArgument(f"{self.name}: attribute {a.name}={value!r} must be {a.type.__name__}")
            if a.choices and value not in a.choices:
                allowed = " or ".join(map(str, a.choices))
                raise InvalidArgument(f"{self.name}: attribute {a.name}={value!r} must be {allowed}")
            values[a.name] = value
        if "kv_dtype" in values:
            _kv(str(values["kv_dtype"]))
        return values

    def bind(
        self, shapes: Mapping[str, Sequence[object] | None], attributes: Mapping[str, AttributeValue]
    ) -> dict[str, object]:
        """The shape rule: what each symbol of the port shapes stands for in a node, from its input shapes.

        shapes: by port name, dimensions as ints or symbols (None: unknown). Raises InvalidArgument where a rank or
        a known dimension contradicts the declaration.
        """
        bound: dict[str, object] = {}
        for port in self.inputs:
            shape = shapes.get(port.name)
            if shape is None:
                continue
            if len(shape) != len(port.shape):
                raise InvalidArgument(
                    f"{self.name}: {port.name} has rank {len(shape)}, want {_shape_text(port)}"
                )
            for declared, actual in zip(port.shape, shape, strict=True):
                want = _evaluate(declared, attributes, bound)
                if port.broadcast and actual == 1:
                    continue
                if isinstance(want, int) and isinstance(actual, int) and want != actual:
                    raise InvalidArgument(
                        f"{self.name}: {port.name} has shape {list(shape)}, want {_shape_text(port)} "
                        f"with {declared} = {want}"
                    )
                if isinstance(declared, str) and (declared not in bound or isinstance(actual, int)):
                    bound[declared] = actual
        return bound

    @staticmethod
    def _ir_dtype(port: Port, attributes: Mapping[str, AttributeValue]) -> ir.DataType:
        import onnx_ir as ir

        name = KV_DTYPES[str(attributes["kv_dtype"])].onnx if port.dtype == KV_POOL else port.dtype
        return ir.DataType[name]


def _kv(name: str) -> KVDtype:
    if name not in KV_DTYPES:
        raise InvalidArgument(f"unknown KV cache dtype {name!r}; use one of {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def _evaluate(dim: int | str, attributes: Mapping[str, AttributeValue], bound: Mapping[str, object]) -> Any:
    """An int when it is known, else the symbol's meaning in this node, else the symbol."""
    if isinstance(dim, int):
        return dim
    if " / " in dim:
        dividend, divisor = (_evaluate(d, attributes, bound) for d in dim.split(" / "))
        known = isinstance(dividend, int) and isinstance(divisor, int)
        return dividend // divisor if known else bound.get(dim, dim)
    factors = dim.split(" * ")
    if all(f in attributes for f in factors):
        product = 1
        for f in factors:
            product *= int(attributes[f])
        return product
    return bound.get(dim, dim)


def _shape_text(port: Port) -> str:
    return f"[{', '.join(str(d) for d in port.shape)}]"


def _ir_attribute(attribute: Attribute, value: AttributeValue) -> ir.Attr:
    import onnx_ir as ir

    if attribute.type is int:
        return ir.AttrInt64(attribute.name, int(value))
    if attribute.type is float:
        return ir.AttrFloat32(attribute.name, float(value))
    return ir.AttrString(attribute.name, str(value))
