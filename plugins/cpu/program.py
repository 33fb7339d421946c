"""program.json: what the native host runs, a chain PackedEmbedding, PackedLayers, PackedHead (ops.py).

    {"inputs": {"cos_sin.0": [64], ...},
     "nodes": [{"op": "PackedLayer", "name": "layers.0", "attributes": {...}, "inputs": {...}, "outputs": [...]}, ...]}

inputs of the file: the sizes, without the first dimension, of rotations and pools (docs/graph.md; a pool's elements are
bytes). Those of a node: by port, the name of a graph's input or of the output of the node before, or a
constant {"offset", "shape", "dtype"} in weights.bin. Constants start at multiples of 64 bytes, each is there once, and
several nodes may name the same (a tied embedding and its head). A port whose value would be the zero [1] that stands
for none is left out. Standard library only.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from trtforge.plugins.cpu.ops import LAYER_LINEARS, NATIVE_OPS
from trtforge.plugins.cpu.packing import COLUMNS, PackedLayout
from trtforge.plugins.errors import EngineFormatError, InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.plugins.opdef import AttributeValue, OpDef, Port

PROGRAM_FILE, WEIGHTS_FILE = "program.json", "weights.bin"

#: Where constants start: multiples of a cache line, bytes.
ALIGNMENT = 64
#: The output of the last node.
LOGITS = "logits"

_ITEM_BYTES = {"uint8": 1, "float32": 4}
_DTYPES = {"UINT8": "uint8", "FLOAT": "float32"}
#: Ports that take an input of the graph of the same name, and those that take one numbered by kind or by KV group.
_INPUTS = ("token_ids", "positions", "query_start", "kv_lengths", "logit_rows")
_GROUP_INPUTS = ("slot_mapping", "block_tables", "kv_pool", "kv_scales")
_NUMBERED = ("cos_sin", *_GROUP_INPUTS)
#: Those of them whose sizes the file has.
SIZED_INPUTS = ("cos_sin", "kv_pool", "kv_scales")
#: Attributes that the host has once for all layers.
_SHARED = ("hidden_size", "num_heads", "num_kv_heads", "head_size", "kv_dtype", "activation_bits")
_MAX_INT = 2**31 - 1
#: Of KV groups and kinds of rotation.
_MAX_NUMBER = 1000


@dataclass(frozen=True)
class Constant:
    """A tensor in weights.bin. offset: in bytes. dtype: uint8 or float32."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Node:
    """inputs: by port of the op's declaration, those that stand for none left out. attributes: all of them."""

    op: str
    name: str
    attributes: Mapping[str, AttributeValue]
    inputs: Mapping[str, "str | Constant"]
    output: str


@dataclass(frozen=True)
class Program:
    """inputs: sizes of rotations and pools, as in the file. nodes: in the order in which they run."""

    inputs: Mapping[str, tuple[int, ...]]
    nodes: tuple[Node, ...]

    @property
    def embedding(self) -> Node:
        return self.nodes[0]

    @property
    def layers(self) -> tuple[Node, ...]:
        return self.nodes[1:-1]

    @property
    def head(self) -> Node:
        return self.nodes[-1]

    def to_json(self) -> str:
        nodes = ",\n".join(json.dumps(_to_raw(n)) for n in self.nodes)
        return f'{{"inputs": {json.dumps(dict(self.inputs))},\n"nodes": [\n{nodes}\n]}}\n'

    def input_sizes(self) -> dict[str, tuple[int, ...]]:
        """What a manifest says too: sizes of rotations, pools and logits, without the first dimension."""
        return {**self.inputs, LOGITS: (cast(int, self.head.attributes["out_features"]),)}

    @classmethod
    def from_json(cls, text: str, where: Path, weights_bytes: int) -> "Program":
        """A program that is sound: the chain that the host runs, its constants within weights.bin.

        where: the path for messages. weights_bytes: the file's size. Raises EngineFormatError for the first fault.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise EngineFormatError(f"{where}: not JSON ({e}); build the engine again") from e
        try:
            fields = _fields(raw, {"inputs": dict, "nodes": list}, "the file")
            inputs = {
                name: _shape(shape, f"inputs: {name!r:.40}") for name, shape in fields["inputs"].items()
            }
            program = cls(inputs, tuple(_node(n, f"nodes[{i}]") for i, n in enumerate(fields["nodes"])))
            _check_chain(program)
            for node in program.nodes:
                _check_node(node)
            _check_sizes(program)
            _check_groups(program)
            _check_inputs(program)
            _check_constants(program, weights_bytes)
        except _Fault as e:
            raise EngineFormatError(f"{where}: {e}; build the engine again") from None
        return program


def number_of(value: "str | Constant") -> int:
    """Of a numbered input of the graph, its number: 1 of `kv_pool.1`."""
    assert isinstance(value, str)
    return int(value.rpartition(".")[2])


def layouts(node: Node) -> dict[str, PackedLayout]:
    """By port, the layout of the packed weights that a node's attributes say it has. Raises ValueError if they
    cannot be."""
    sizes = cast(Mapping[str, int], node.attributes)
    if node.op != "PackedLayer":
        names = (
            "in_features",
            "out_features",
            "bits",
            "zero_point",
            "group_size",
            "scale_bits",
            "has_minimums",
        )
        return {"weights": _layout(*(sizes[name] for name in names))}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    inputs = {"o": sizes["num_heads"] * sizes["head_size"], "down": inner}
    found = {}
    for name, size in LAYER_LINEARS.items():
        outputs = math.prod(sizes[factor] for factor in size.split(" * "))
        numbers = str(node.attributes[f"{name}_format"]).split(" ")
        if len(numbers) != 5 or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
            raise ValueError(f"{name}_format {node.attributes[f'{name}_format']!r:.60} is no format")
        found[f"{name}_weights"] = _layout(inputs.get(name, hidden), outputs, *map(int, numbers))
    return found


class _Fault(Exception):
    """What is wrong and where in the file."""


def _layout(
    columns: int, rows: int, bits: int, zero_point: int, group_size: int, scale_bits: int, has_minimums: int
) -> PackedLayout:
    layout = PackedLayout(columns, rows, bits, zero_point, group_size, scale_bits, has_minimums == 1)
    known = (
        (bits, zero_point) in ((4, 0), (4, 8), (8, 0), (8, 128))
        and scale_bits in (16, 32)
        and has_minimums in (0, 1)
    )
    if not known or min(columns, rows, group_size) < 1 or group_size % COLUMNS or columns % group_size:
        raise ValueError(f"weights of [{rows}, {columns}] in the format {layout.format!r} cannot be")
    return layout


def _to_raw(node: Node) -> dict[str, Any]:
    inputs = {
        port: value
        if isinstance(value, str)
        else {"offset": value.offset, "shape": list(value.shape), "dtype": value.dtype}
        for port, value in node.inputs.items()
    }
    return {
        "op": node.op,
        "name": node.name,
        "attributes": dict(node.attributes),
        "inputs": inputs,
        "outputs": [node.output],
    }


def _fields(raw: object, kinds: Mapping[str, type], at: str) -> dict[str, Any]:
    """A JSON object of just these fields."""
    if not isinstance(raw, dict):
        raise _Fault(f"{at} is {raw!r:.40}, want an object")
    if raw.keys() != kinds.keys():
        raise _Fault(f"{at} has the fields {sorted(raw)!r:.80}, want {', '.join(kinds)}")
    for name, kind in kinds.items():
        if type(raw[name]) is not kind:
            raise _Fault(f"{at}: {name} is {raw[name]!r:.40}, want {kind.__name__}")
    return raw


def _node(raw: object, at: str) -> Node:
    kinds = {"op": str, "name": str, "attributes": dict, "inputs": dict, "outputs": list}
    fields = _fields(raw, kinds, at)
    op = NATIVE_OPS.get(fields["op"])
    if op is None:
        raise _Fault(f"{at}: op {fields['op']!r:.40} is none of {', '.join(NATIVE_OPS)}")
    outputs = fields["outputs"]
    if len(outputs) != 1 or not isinstance(outputs[0], str):
        raise _Fault(f"{at}: outputs are {outputs!r:.40}, want one name")
    inputs = {
        port: value if isinstance(value, str) else _constant(value, f"{at}: {port}")
        for port, value in fields["inputs"].items()
    }
    return Node(op.name, fields["name"], _attributes(op, fields["attributes"], at), inputs, outputs[0])


def _constant(raw: object, at: str) -> Constant:
    fields = _fields(raw, {"offset": int, "shape": list, "dtype": str}, at)
    offset, shape, dtype = fields["offset"], fields["shape"], fields["dtype"]
    if dtype not in _ITEM_BYTES:
        raise _Fault(f"{at}: dtype {dtype!r:.40} is neither {' nor '.join(_ITEM_BYTES)}")
    if offset < 0 or offset % ALIGNMENT:
        raise _Fault(f"{at}: offset {offset!r:.40} is no multiple of {ALIGNMENT}")
    return Constant(offset, _shape(shape, at), dtype)


def _shape(raw: object, at: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= 5:
        raise _Fault(f"{at}: shape {raw!r:.40} cannot be")
    if not all(type(d) is int and 0 < d <= _MAX_INT for d in raw):
        raise _Fault(f"{at}: shape {raw!r:.40} cannot be")
    return tuple(raw)


def _attributes(op: OpDef, raw: Mapping[str, object], at: str) -> dict[str, AttributeValue]:
    for name, value in raw.items():
        if isinstance(value, int | float) and not 0 <= value <= _MAX_INT:  # NaN is not either
            raise _Fault(f"{at}: attribute {name!r:.40} is {value!r:.40}, want 0 to {_MAX_INT}")
    try:
        return op.complete(cast(Mapping[str, AttributeValue], raw))
    except InvalidArgument as e:
        raise _Fault(f"{at}: {e}") from None


def _check_chain(program: Program) -> None:
    """Each node takes the output of the one before."""
    ops = [node.op for node in program.nodes]
    if len(ops) < 3 or ops != ["PackedEmbedding", *["PackedLayer"] * (len(ops) - 2), "PackedHead"]:
        raise _Fault(f"its {len(ops)} nodes are not PackedEmbedding, layers of PackedLayer, PackedHead")
    for what, names in {
        "nodes have the name": [n.name for n in program.nodes],
        "nodes give": [n.output for n in program.nodes],
    }.items():
        name, count = Counter(names).most_common(1)[0]
        if count > 1:
            raise _Fault(f"{count} {what} {name!r:.60}")
    for before, node in pairwise(program.nodes):
        if node.inputs.get("x") != before.output:
            raise _Fault(
                f"{node.name!r:.60} reads {node.inputs.get('x')!r:.60}, not {before.output!r:.60} of the node before"
            )
    if program.head.output != LOGITS:
        raise _Fault(f"{program.head.name!r:.60} gives {program.head.output!r:.60}, want {LOGITS!r}")


def _check_node(node: Node) -> None:
    """Its inputs are those of the declaration, and constants have the shapes that the attributes ask for."""
    at, op = f"{node.name!r:.60}", NATIVE_OPS[node.op]
    ports = {p.name: p for p in op.ports(str(node.attributes.get("kv_dtype", "fp32")))[0]}
    for name in node.inputs.keys() - ports.keys():
        raise _Fault(f"{at}: {node.op} takes no {name!r:.40}")
    for port in ports.values():
        _check_input(port, node.inputs.get(port.name), at)
    try:
        wanted = layouts(node)
        shapes = {port: value.shape for port, value in _constants(node).items()}
        op.bind(shapes, node.attributes)
    except (ValueError, InvalidArgument) as e:
        raise _Fault(f"{at}: {e}") from None
    for name, layout in wanted.items():
        if shapes[name] != layout.shape:
            raise _Fault(f"{at}: {name} has shape {list(shapes[name])}, want {list(layout.shape)}")


def _check_input(port: Port, value: "str | Constant | None", at: str) -> None:
    if value is None:
        if not port.broadcast:
            raise _Fault(f"{at}: {port.name} is missing")
    elif port.name == "x":
        pass  # _check_chain
    elif port.name in _INPUTS:
        if value != port.name:
            raise _Fault(f"{at}: {port.name} is {value!r:.60}, want the input of that name")
    elif port.name in _NUMBERED:
        name, _, number = value.rpartition(".") if isinstance(value, str) else ("", "", "")
        if name != port.name or number not in map(str, range(_MAX_NUMBER)):
            raise _Fault(f"{at}: {port.name} is {value!r:.60}, want an input like '{port.name}.0'")
    elif not isinstance(value, Constant) or value.dtype != _DTYPES[port.dtype]:
        raise _Fault(f"{at}: {port.name} is {value!r:.60}, want a constant of {_DTYPES[port.dtype]}")
    elif port.broadcast and value.shape == (1,):
        raise _Fault(f"{at}: {port.name} has shape [1]; what the model does not have is left out")


def _check_sizes(program: Program) -> None:
    """One size of the residual stream, and the same heads in all layers."""
    first, hidden = program.layers[0], program.embedding.attributes["in_features"]
    for layer in program.layers:
        for name in _SHARED:
            if layer.attributes[name] != first.attributes[name]:
                raise _Fault(
                    f"{layer.name!r:.60}: {name} is {layer.attributes[name]!r:.20}, "
                    f"{first.attributes[name]!r:.20} in the first layer"
                )
    for node, name in ((first, "hidden_size"), (program.head, "in_features")):
        if node.attributes[name] != hidden:
            raise _Fault(f"{node.name!r:.60}: {name} is {node.attributes[name]}, the embedding's {hidden}")
    heads, kv_heads = (cast(int, first.attributes[name]) for name in ("num_heads", "num_kv_heads"))
    if heads % kv_heads:
        raise _Fault(f"num_kv_heads {kv_heads} does not divide num_heads {heads}")


def _group(layer: Node) -> int:
    groups = {number_of(layer.inputs[port]) for port in _GROUP_INPUTS if port in layer.inputs}
    if len(groups) != 1:
        raise _Fault(f"{layer.name!r:.60} takes inputs of several KV groups")
    return groups.pop()


def _check_groups(program: Program) -> None:
    """Within a KV group, each layer has a place of its own in the pool, and none is left over."""
    places: dict[int, list[object]] = {}
    for layer in program.layers:
        places.setdefault(_group(layer), []).append(layer.attributes["layer"])
    for group, taken in places.items():
        if set(taken) != set(range(len(taken))):
            raise _Fault(
                f"the {len(taken)} layers of KV group {group} do not have places 0 to {len(taken) - 1}"
            )


def _check_inputs(program: Program) -> None:
    """Rotations and pools are those that the layers take, numbered from 0, with the sizes that attributes ask for."""
    taken = {n.inputs[port] for n in program.layers for port in SIZED_INPUTS if port in n.inputs}
    for name in sorted(program.inputs.keys() ^ taken, key=str):
        raise _Fault(f"input {name!r:.60} is taken by no layer, or has no size")
    first = program.layers[0].attributes
    heads, head_size = cast(int, first["num_kv_heads"]), cast(int, first["head_size"])
    dtype = KV_DTYPES[str(first["kv_dtype"])]
    layers = Counter(_group(layer) for layer in program.layers)
    tokens_per_block = program.inputs[f"kv_pool.{min(layers)}"][3:4]
    for name, shape in program.inputs.items():
        port, number = name.rpartition(".")[0], number_of(name)
        if number and f"{port}.{number - 1}" not in program.inputs:
            raise _Fault(f"input {name!r} has none before it")
        if port == "cos_sin":
            if len(shape) != 1 or shape[0] % 2 or shape[0] > head_size:
                raise _Fault(f"input {name!r} has sizes {list(shape)}, want an even number up to {head_size}")
            continue
        last = head_size * dtype.bytes if port == "kv_pool" else dtype.scales
        wanted = (layers[number], 2, heads, *tokens_per_block, last)
        if shape != wanted:
            raise _Fault(f"input {name!r} has sizes {list(shape)}, want {list(wanted)}")


def _check_constants(program: Program, weights_bytes: int) -> None:
    """Each within the file, and none a part of another."""
    by_offset: dict[int, Constant] = {}
    for node in program.nodes:
        for port, constant in _constants(node).items():
            if constant.offset + constant.bytes > weights_bytes:
                raise _Fault(
                    f"{node.name!r:.60}: {port} ends at byte {constant.offset + constant.bytes}, "
                    f"{WEIGHTS_FILE} has {weights_bytes}"
                )
            if by_offset.setdefault(constant.offset, constant) != constant:
                raise _Fault(f"{node.name!r:.60}: {port} overlaps another constant at byte {constant.offset}")
    ordered = sorted(by_offset.values(), key=lambda c: c.offset)
    for before, constant in pairwise(ordered):
        if before.offset + before.bytes > constant.offset:
            raise _Fault(f"the constants at bytes {before.offset} and {constant.offset} overlap")


def _constants(node: Node) -> dict[str, Constant]:
    return {port: value for port, value in node.inputs.items() if isinstance(value, Constant)}
