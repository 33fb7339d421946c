"""One op over a paged cache, run twice: its ONNX body by ONNX Runtime, its C++ kernel by OpenVINO's real pipeline."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import DOMAIN, DOMAIN_VERSION, OPS, OPSET, OpDef
from trtforge.plugins.kv_codec import e4m3_value
from trtforge.plugins.kv_dtypes import KV_DTYPES

LAYERS, LAYER = 3, 1
PAGED_OPS = ("KVCacheUpdate", "PagedAttention")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """A step: its shape of heads and cache, and each sequence's (tokens in the cache, of them this step's)."""

    sequences: tuple[tuple[int, int], ...] = ((37, 5), (1, 1), (16, 16), (90, 1), (50, 17))
    kv_dtype: str = "fp32"
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 64
    tokens_per_block: int = 16
    rotary: int | None = None  # None: all of the head
    window: int = 0
    softcap: float = 0.0

    def attributes(self, op: str) -> dict[str, Any]:
        common = {
            "layer": LAYER,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "kv_dtype": self.kv_dtype,
        }
        if op == "KVCacheUpdate":
            return common
        return common | {"scale": self.head_size**-0.5, "window": self.window, "softcap": self.softcap}


def make_inputs(case: Case, rng: np.random.Generator) -> Arrays:
    """All inputs of both ops, by port name. kv_pool is bytes [.., head_size * bytes]; every slot of the cache that no
    sequence has written holds what must never be read: NaN where the type has one."""
    tokens, block = sum(n for _, n in case.sequences), case.tokens_per_block
    needed = [-(-length // block) for length, _ in case.sequences]
    num_blocks = sum(needed) + 3
    free = rng.permutation(num_blocks).tolist()
    tables = np.zeros((len(needed), max(needed) + 1), np.int32)
    positions, slots, written = [], [], []
    for b, (length, queries) in enumerate(case.sequences):
        tables[b, : needed[b]] = [free.pop() for _ in range(needed[b])]
        all_slots = [int(tables[b, p // block]) * block + p % block for p in range(length)]
        written += all_slots
        positions += range(length - queries, length)
        slots += all_slots[length - queries :]
    kv, d = KV_DTYPES[case.kv_dtype], case.head_size
    shape = (num_blocks, LAYERS, 2, case.num_kv_heads, block)
    pool, garbage = _random_rows((*shape, d), case.kv_dtype, rng)
    scales = rng.uniform(0.005, 0.02, (*shape, 1)).astype(np.float32)
    unwritten = np.ones(num_blocks * block, bool)
    unwritten[written] = False
    at = np.nonzero(unwritten.reshape(num_blocks, block))
    pool[at[0], :, :, :, at[1]] = garbage
    scales[at[0], :, :, :, at[1]] = np.nan
    inputs: Arrays = {
        "q": rng.standard_normal((tokens, case.num_heads * d), np.float32),
        "k": rng.standard_normal((tokens, case.num_kv_heads * d), np.float32),
        "v": rng.standard_normal((tokens, case.num_kv_heads * d), np.float32),
        "cos_sin": _cos_sin(np.array(positions), d if case.rotary is None else case.rotary),
        "slot_mapping": np.array(slots, np.int64),
        "kv_pool": pool,
        "positions": np.array(positions, np.int32),
        "query_start": np.cumsum([0, *(n for _, n in case.sequences)], dtype=np.int32),
        "kv_lengths": np.array([length for length, _ in case.sequences], np.int32),
        "block_tables": tables,
    }
    return inputs | ({"kv_scales": scales} if kv.scales else {})


def _cos_sin(positions: NDArray[Any], rotary: int) -> NDArray[np.float32]:
    angles = np.outer(positions, 10000.0 ** (-np.arange(0, rotary, 2) / rotary))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _random_rows(
    shape: Sequence[int], kv_dtype: str, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], Any]:
    """(random elements of the type as bytes, the bytes of a value never to be read, one element's repeated)."""
    if kv_dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8).view(np.uint8), 0x80
    if kv_dtype == "fp8":
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 1
        return codes, 0x7F
    values = rng.standard_normal(shape, np.float32)
    if kv_dtype == "fp16":
        return values.astype(np.float16).view(np.uint8), 0xFF
    if kv_dtype == "bf16":
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8), 0xFF
    return values.view(np.uint8), 0xFF


def _onnx_types(op: OpDef, case: Case) -> tuple[dict[str, str], dict[str, str]]:
    inputs, outputs = op.ports(case.kv_dtype)
    names = {"activation": "FLOAT", "kv_dtype": KV_DTYPES[case.kv_dtype].onnx}
    return (
        {p.name: names.get(p.dtype, p.dtype) for p in inputs},
        {p.name: names.get(p.dtype, p.dtype) for p in outputs},
    )


def _model(
    op: OpDef,
    case: Case,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    shapes: Mapping[str, Sequence[int]],
) -> Any:
    """A model of the one node; dimensions are dynamic but for the inputs in `shapes`."""
    from onnx import TensorProto, helper

    def info(name: str, dtype: str) -> Any:
        shape = shapes.get(name, [None] * _RANKS.get(name, 2))
        return helper.make_tensor_value_info(name, TensorProto.DataType.Value(dtype), shape)

    node = helper.make_node(op.name, list(inputs), list(outputs), domain=DOMAIN, **case.attributes(op.name))
    graph = helper.make_graph(
        [node], "op", [info(*i) for i in inputs.items()], [info(*o) for o in outputs.items()]
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


_RANKS = {
    "slot_mapping": 1,
    "positions": 1,
    "query_start": 1,
    "kv_lengths": 1,
    "kv_pool": 6,
    "kv_scales": 6,
    "kv_pool_out": 6,
    "kv_scales_out": 6,
}


@cache
def body_model(name: str, case: Case) -> Any:
    """The one-node ONNX model with the op's function, sequences aside."""
    op = OPS[name]
    model = _model(op, case, *_onnx_types(op, case), {})
    model.functions.append(op.function(case.kv_dtype))
    return model


@cache
def _session(name: str, case: Case) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        body_model(name, case).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_body(name: str, case: Case, inputs: Arrays) -> Arrays:
    """Outputs by port name, pools as bytes; the inputs are left as they are."""
    import onnxruntime
    from onnx import TensorProto

    key = replace(case, sequences=())
    in_types, out_types = _onnx_types(OPS[name], case)
    feeds, shapes = {}, {}
    for port, dtype in in_types.items():
        array, kind = inputs[port], TensorProto.DataType.Value(dtype)
        if port == "kv_pool":
            carrier = {"FLOAT": np.float32, "FLOAT16": np.float16, "BFLOAT16": np.uint16, "INT8": np.int8}[
                dtype
            ]
            array = array.view(carrier)
            shapes["kv_pool_out"] = array.shape
        feeds[port] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            np.ascontiguousarray(array), kind
        )
    results = _session(name, key).run_with_ort_values(list(out_types), feeds)
    return {
        port: _bytes_of(r) if port == "kv_pool_out" else r.numpy()
        for port, r in zip(out_types, results, strict=True)
    }


def _bytes_of(value: Any) -> NDArray[np.uint8]:
    """A tensor's memory, its last dimension in bytes; numpy has no bfloat16."""
    *shape, last = value.shape()
    size = {"tensor(float)": 4, "tensor(float16)": 2, "tensor(bfloat16)": 2, "tensor(int8)": 1}[
        value.data_type()
    ]
    count = int(np.prod(shape, dtype=np.int64)) * last * size
    memory = (ctypes.c_uint8 * count).from_address(value.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(*shape, last * size).copy()


@cache
def core() -> Any:
    """An OpenVINO core that knows our ops."""
    import openvino

    from trtforge.plugins import cpu

    core = openvino.Core()
    cpu.register(core)
    return core


def lowered_model(name: str, case: Case, shapes: Mapping[str, Sequence[int]]) -> Any:
    """The one-node ONNX model as the CPU target lowers it: pools are bytes, and no outputs."""
    in_types, _ = _onnx_types(OPS[name], case)
    return _model(
        OPS[name], case, in_types | {"kv_pool": "UINT8"}, {OPS[name].outputs[0].name: "FLOAT"}, shapes
    )


def read_lowered(name: str, case: Case) -> Any:
    """OpenVINO's model of it."""
    return core().read_model(lowered_model(name, case, {}).SerializeToString())


@cache
def compiled(name: str, case: Case, threads: int = 2) -> Any:
    """The op's infer request, compiled as the CPU executor compiles a model."""
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "ENABLE_CPU_PINNING": False,
    }
    return core().compile_model(read_lowered(name, case), "CPU", config).create_infer_request()


def run_kernel(name: str, case: Case, inputs: Arrays, threads: int = 2) -> NDArray[np.float32]:
    """The one output; the pools among the inputs are written in place."""
    import openvino

    request = compiled(name, replace(case, sequences=()), threads)
    for port in OPS[name].ports(case.kv_dtype)[0]:
        request.set_tensor(port.name, openvino.Tensor(inputs[port.name], shared_memory=True))
    request.infer()
    return np.array(request.get_output_tensor(0).data)


def e4m3_table() -> NDArray[np.float32]:
    return np.array([e4m3_value(c) for c in range(256)], np.float32)
