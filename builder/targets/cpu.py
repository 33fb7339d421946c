"""CPU: OpenVINO runs the graph; our ops are C++ in its extension (trtforge.plugins.cpu).

The plain graph threads each pool through its KVCacheUpdates to an output. OpenVINO would copy a pool that
is an op's output at every step, so here the ops give only the rotated q and the attention: they write in
place into the pools, which are plain inputs, and the edge of q orders write before read. A pool is a u8
tensor with a dynamic first dimension, the bytes of an element folded into the last one: parameters of
16-bit types are converted whole at every step and writes into them are lost.
"""

import errno
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.builder.graph import save_graph
from trtforge.builder.targets import Progress
from trtforge.plugins import cpu as plugin
from trtforge.plugins.errors import EngineFailure
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.plugins.opdef import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


_FIRST_POOL_INPUT, _FIRST_POOL_OUTPUT = 5, 1  # of KVCacheUpdate: kv_pool, kv_scales


def compile(graph: "ir.Model", directory: Path, progress: Progress) -> Mapping[str, str]:
    """Write model.xml and model.bin. Weights go through a file of ONNX external data, tensor by tensor."""
    import openvino

    onnx_file = directory / "graph.onnx"
    save_graph(lower(graph), onnx_file, progress)
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
    for temporary in directory.glob(onnx_file.name + "*"):
        temporary.unlink()
    progress("convert", 1, 1)
    return {"openvino": version("openvino")}


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
    return model


def _make_bytes(pool: "ir.Value") -> None:
    """[num_blocks, ..., head_size] of the cache's type -> [num_blocks, ..., head_size * bytes] of u8."""
    import onnx_ir as ir

    kv_dtype = next(n.attributes["kv_dtype"].as_string() for n, _ in pool.uses())
    assert pool.shape is not None
    sizes = list(pool.shape)
    assert all(isinstance(d, int) for d in sizes[1:]) and not isinstance(sizes[0], int), sizes
    pool.shape = ir.Shape([*sizes[:-1], int(sizes[-1]) * KV_DTYPES[kv_dtype].bytes])  # type: ignore[arg-type]
    pool.dtype = ir.DataType.UINT8


def _plugin_nodes(model: "ir.Model") -> Iterator["ir.Node"]:
    return (node for node in model.graph if node.domain == DOMAIN)


def _is_pool(name: str | None) -> bool:
    return name is not None and name.startswith(("kv_pool", "kv_scales"))


def _reason(error: Exception) -> str:
    """OpenVINO's messages are pages; their last line says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
