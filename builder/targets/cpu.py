"""CPU: the native host runs graphs that are packed throughout, OpenVINO all others; our ops are C++ in both.

The plain graph threads each pool through its KVCacheUpdates to an output. OpenVINO would copy a pool that
is an op's output at every step, so here the ops give only the rotated q and the attention: they write in
place into the pools, which are plain inputs, and the edge of q orders write before read. A pool is a u8
tensor with a dynamic first dimension, the bytes of an element folded into the last one: parameters of
16-bit types are converted whole at every step and writes into them are lost.

A graph whose linears are all quantized becomes a chain of a few ops (builder/passes/fuse_decoder.py), written as
program.json and weights.bin (trtforge.plugins.cpu.program). One with anything else in it goes to OpenVINO as
model.xml and model.bin: its cost per op and its sleeping threads matter less there.
"""

import errno
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

from trtforge.builder.graph import save_graph
from trtforge.builder.passes.fuse_decoder import fuse_decoder, unquantized
from trtforge.builder.passes.fuse_layers import is_none
from trtforge.builder.passes.pack_linears import pack_linears
from trtforge.builder.targets import Progress
from trtforge.plugins import DOMAIN
from trtforge.plugins import cpu as plugin
from trtforge.plugins.cpu.ops import NATIVE_OPS
from trtforge.plugins.cpu.program import (
    ALIGNMENT,
    PROGRAM_FILE,
    SIZED_INPUTS,
    WEIGHTS_FILE,
    Constant,
    Node,
    Program,
)
from trtforge.plugins.errors import EngineFailure
from trtforge.plugins.kv_dtypes import KV_DTYPES

if TYPE_CHECKING:
    import onnx_ir as ir


#: Bytes of a copy's piece.
_COPIED = 1 << 24

_FIRST_POOL_INPUT, _FIRST_POOL_OUTPUT = 5, 1  # of KVCacheUpdate: kv_pool, kv_scales


_log = logging.getLogger(__name__)


def compile(graph: "ir.Model", directory: Path, progress: Progress) -> Mapping[str, str]:
    """Write program.json and weights.bin, or model.xml and model.bin."""
    lowered = lower(graph)
    if (chain := fuse_decoder(lowered)) is not None:
        write_program(chain, directory, progress)
        return plugin.native_versions()
    if any(node.op_type == "PackedLinear" for node in lowered.graph):
        names = unquantized(lowered)
        _log.warning(
            "%d weights are not quantized, so OpenVINO runs the engine, slower than the native host would: %s",
            len(names),
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )
    _compile_openvino(lowered, directory, progress)
    return plugin.versions()


def write_program(chain: "ir.Model", directory: Path, progress: Progress) -> None:
    """Write what fuse_decoder gave as program.json and weights.bin, one tensor at a time."""
    constants: dict[str | None, Constant] = {}
    weights = [value for value in chain.graph.initializers.values() if not is_none(value)]
    with (directory / WEIGHTS_FILE).open("wb") as out:
        for i, value in enumerate(weights):
            progress("weights", i, len(weights))
            assert value.const_value is not None
            array = np.ascontiguousarray(value.const_value.numpy())
            out.write(bytes(-out.tell() % ALIGNMENT))
            constants[value.name] = Constant(out.tell(), array.shape, array.dtype.name)
            out.write(array.data)
            del array
    progress("weights", len(weights), len(weights))
    sized = [v for v in chain.graph.inputs if (v.name or "").startswith(SIZED_INPUTS)]
    inputs = {v.name or "": tuple(int(d) for d in list(v.shape or ())[1:]) for v in sized}  # type: ignore[arg-type]
    program = Program(inputs, tuple(_program_node(node, constants) for node in chain.graph))
    (directory / PROGRAM_FILE).write_text(program.to_json())


def _program_node(node: "ir.Node", constants: Mapping[str | None, Constant]) -> Node:
    attributes = {name: a.value for name, a in node.attributes.items()}
    ports, _ = NATIVE_OPS[node.op_type].ports(str(attributes.get("kv_dtype", "fp32")))
    inputs: dict[str, str | Constant] = {}
    for port, value in zip(ports, node.inputs, strict=True):
        assert value is not None and value.name
        if not value.is_initializer():
            inputs[port.name] = value.name
        elif value.name in constants:
            inputs[port.name] = constants[value.name]
    output = node.outputs[0].name
    assert node.name and output
    return Node(node.op_type, node.name, attributes, inputs, output)


def _compile_openvino(lowered: "ir.Model", directory: Path, progress: Progress) -> None:
    """Write model.xml and model.bin. Weights go through a file of ONNX external data, tensor by tensor."""
    import openvino

    onnx_file = directory / "graph.onnx"
    save_graph(lowered, onnx_file, progress)
    core = openvino.Core()
    plugin.register(core)
    progress("convert", 0, 1)
    try:
        model = core.read_model(onnx_file)
    except RuntimeError as e:
        raise EngineFailure(f"OpenVINO could not read the graph: {_reason(e)}") from e
    try:
        openvino.save_model(model, directory / "model.xml", compress_to_fp16=False)
    except RuntimeError as e:
        raise OSError(
            errno.EIO, f"OpenVINO could not write model.bin ({_reason(e)}); is the disk full?"
        ) from e
    del model
    _align(directory)
    for temporary in directory.glob(onnx_file.name + "*"):
        temporary.unlink()
    progress("convert", 1, 1)


def _align(directory: Path) -> None:
    """Put each constant of model.bin at a multiple of 64 bytes, a cache line: the file is mapped and read as it is.

    OpenVINO writes them back to back.
    """
    tree = ElementTree.parse(directory / "model.xml")
    constants = [data for data in tree.iter("data") if "offset" in data.attrib]
    moved: dict[tuple[int, int], int] = {}  # (offset, size) -> new offset
    packed, aligned = directory / "model.bin", directory / "model.bin.aligned"
    with packed.open("rb") as source, aligned.open("wb") as out:
        for place in sorted({(int(c.attrib["offset"]), int(c.attrib["size"])) for c in constants}):
            out.write(bytes(-out.tell() % ALIGNMENT))
            moved[place] = out.tell()
            source.seek(place[0])
            for start in range(0, place[1], _COPIED):
                out.write(source.read(min(_COPIED, place[1] - start)))
    for constant in constants:
        place = int(constant.attrib["offset"]), int(constant.attrib["size"])
        constant.set("offset", str(moved[place]))
    tree.write(directory / "model.xml")
    aligned.rename(packed)


def lower(graph: "ir.Model") -> "ir.Model":
    """The plain graph -> the same without pool outputs and function bodies, its pools u8 inputs."""
    model = graph.clone()
    model.graph.outputs[:] = [o for o in model.graph.outputs if not _is_pool(o.name)]
    for node in _plugin_nodes(model):
        if node.op_type != "KVCacheUpdate":
            continue
        # In graph order, so a pool that comes from an earlier layer is the graph's input already.
        pools = node.inputs[_FIRST_POOL_INPUT:]
        for output, pool in zip(node.outputs[_FIRST_POOL_OUTPUT:], pools, strict=True):
            assert pool is not None
            output.replace_all_uses_with(pool)
        node.resize_outputs(_FIRST_POOL_OUTPUT)
    for value in model.graph.inputs:
        if value.name is not None and value.name.startswith("kv_pool."):
            _make_bytes(value)
    model.functions.clear()
    for node in list(model.graph):
        _bare_gate(node)
    return pack_linears(model)


def _bare_gate(gated: "ir.Node") -> None:
    """activation(gate) * up -> (gate * up) * factor(gate), the same up to rounding.

    OpenVINO would fuse an activation that is the only reader of a linear into it, and run such a linear with a
    kernel that sums in another order for few rows than for many. One that is not fused always runs with the same
    kernel, and a row's result is then the same whatever the other rows are.
    """
    import onnx_ir as ir

    active = _producer(gated.inputs[0]) if gated.op_type == "Mul" else None
    if active is None or not active.inputs:
        return
    gate, up = active.inputs[0], gated.inputs[1]
    if gate is None or not _is(gate, "Gemm"):
        return
    nodes: list[ir.Node] = []
    if active.op_type == "Mul" and _is(active.inputs[1], "Sigmoid"):  # SiLU
        factor = active.inputs[1]
    elif active.op_type == "Gelu":
        assert active.attributes["approximate"].as_string() == "tanh"
        factor = _gelu_factor(gate, nodes)
    else:
        return
    product = ir.Node("", "Mul", [gate, up], name=f"{gated.name}.product")
    gated.prepend([*nodes, product])
    gated.replace_input_with(0, product.outputs[0])
    gated.replace_input_with(1, factor)
    assert gated.graph is not None
    gated.graph.remove(active, safe=True)


def _gelu_factor(gate: "ir.Value", nodes: list["ir.Node"]) -> "ir.Value":
    """gelu(x) / x = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2 (Hendrycks and Gimpel 2016).

    The nodes that compute it are added to `nodes`.
    """
    import onnx_ir as ir

    def op(op_type: str, *inputs: ir.Value) -> ir.Value:
        nodes.append(ir.Node("", op_type, inputs))
        return nodes[-1].outputs[0]

    def number(value: float) -> ir.Value:
        tensor = ir.tensor(np.array(value, np.float32))
        nodes.append(ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)]))
        return nodes[-1].outputs[0]

    cube = op("Mul", op("Mul", gate, gate), gate)
    inner = op("Add", gate, op("Mul", cube, number(0.044715)))
    tanh = op("Tanh", op("Mul", inner, number(math.sqrt(2 / math.pi))))
    return op("Mul", op("Add", tanh, number(1.0)), number(0.5))


def _is(value: "ir.Value | None", op_type: str) -> bool:
    producer = _producer(value)
    return producer is not None and producer.op_type == op_type


def _producer(value: "ir.Value | None") -> "ir.Node | None":
    return None if value is None else value.producer()


def _make_bytes(pool: "ir.Value") -> None:
    """[num_blocks, ..., head_size] of the cache's type -> [num_blocks, ..., head_size * bytes] of u8."""
    import onnx_ir as ir

    kv_dtype = next(n.attributes["kv_dtype"].as_string() for n, _ in pool.uses())
    assert pool.shape is not None
    sizes = list(pool.shape)
    assert all(isinstance(d, int) for d in sizes[1:]) and not isinstance(sizes[0], int), sizes
    pool.shape = ir.Shape([*sizes[:-1], int(sizes[-1]) * KV_DTYPES[kv_dtype].bytes])  # type: ignore[arg-type]
    pool.type = ir.TensorType(ir.DataType.UINT8)  # a new one: a clone shares its types


def _plugin_nodes(model: "ir.Model") -> Iterator["ir.Node"]:
    return (node for node in model.graph if node.domain == DOMAIN)


def _is_pool(name: str | None) -> bool:
    return name is not None and name.startswith(("kv_pool", "kv_scales"))


def _reason(error: Exception) -> str:
    """OpenVINO's messages are pages; their last line says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
