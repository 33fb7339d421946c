"""One QuantLinear, run twice: its ONNX body by ONNX Runtime, its packed form by the C++ kernel in OpenVINO."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import DOMAIN, DOMAIN_VERSION, OPS, OPSET
from trtforge.plugins.cpu.packing import PackedLayout, pack, packed_layout

Array = NDArray[Any]
CODES = {"UINT4": (0, 16), "INT4": (-8, 8), "UINT8": (0, 256), "INT8": (-128, 128)}
_SCALES = {"FLOAT16": np.float16, "FLOAT": np.float32}


@dataclass(frozen=True)
class Case:
    """A linear [N, K]. group_size: of weights; 0: all of a row."""

    shape: tuple[int, int] = (48, 192)
    code_type: str = "UINT4"
    group_size: int = 32
    scale_type: str = "FLOAT16"
    has_minimums: bool = True
    has_bias: bool = False
    activation_bits: int = 8

    @property
    def group(self) -> int:
        return self.group_size or self.shape[1]

    @property
    def layout(self) -> PackedLayout:
        return packed_layout(self.shape, self.code_type, self.group, self.scale_type, self.has_minimums)


@dataclass(frozen=True)
class Weights:
    codes: Array  # one number per element
    scales: Array
    minimums: Array | None
    bias: NDArray[np.float32]

    @property
    def values(self) -> NDArray[np.float64]:
        groups = self.codes.reshape(*self.scales.shape, -1).astype(np.float64) * self.scales[..., None]
        if self.minimums is not None:
            groups = groups + self.minimums[..., None]
        return groups.reshape(self.codes.shape)


def make_weights(case: Case, rng: np.random.Generator) -> Weights:
    """All codes of the type occur; the sizes are those of a model's weights."""
    rows, columns = case.shape
    low, high = CODES[case.code_type]
    codes = rng.integers(low, high, case.shape).astype(np.int8 if low else np.uint8)
    groups, dtype = (rows, columns // case.group), _SCALES[case.scale_type]
    scales = (rng.uniform(0.01, 0.1, groups) * rng.choice([-1, 1], groups) / (high - low)).astype(dtype)
    minimums = rng.uniform(-0.1, 0.1, groups).astype(dtype) if case.has_minimums else None
    bias = rng.standard_normal(rows, np.float32) if case.has_bias else np.zeros(1, np.float32)
    return Weights(codes, scales, minimums, bias)


def round_activations(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the op makes of x with 8-bit activations, written once more in numpy."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    unit = np.where(largest < np.float32(1e-30), np.float32(1), largest / np.float32(127))
    return (np.rint(groups / unit) * unit).reshape(x.shape)


def run_body(case: Case, weights: Weights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The op's definition."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(
        body_model(case, weights).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


def body_model(case: Case, weights: Weights) -> Any:
    """The one-node ONNX model with the op's function."""
    from onnx import numpy_helper

    minimums = np.zeros((1, 1), weights.scales.dtype) if weights.minimums is None else weights.minimums
    four_bits = {"UINT4": ml_dtypes.uint4, "INT4": ml_dtypes.int4}.get(case.code_type)
    codes = weights.codes.astype(four_bits) if four_bits else weights.codes
    constants = {"codes": codes, "scales": weights.scales, "minimums": minimums, "bias": weights.bias}
    attributes = {"group_size": case.group, "activation_bits": case.activation_bits}
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    model = _model("QuantLinear", ["x", *constants], attributes, initializers, case)
    model.functions.append(OPS["QuantLinear"].function())
    return model


class Kernel:
    """The packed linear, compiled as the CPU executor compiles a model."""

    def __init__(self, case: Case, weights: Weights, threads: int = 2) -> None:
        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        graph = core().read_model(packed_model(case, weights).SerializeToString())
        self.compiled = core().compile_model(graph, "CPU", config | {"ENABLE_CPU_PINNING": False})
        self._request = self.compiled.create_infer_request()

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        self._request.infer([np.ascontiguousarray(x)])
        return np.array(self._request.get_output_tensor(0).data)


def packed_model(case: Case, weights: Weights) -> Any:
    """The one-node ONNX model as the CPU target lowers it."""
    from onnx import numpy_helper

    packed = pack(case.layout, weights.codes, weights.scales, weights.minimums)
    constants = [numpy_helper.from_array(packed, "weights"), numpy_helper.from_array(weights.bias, "bias")]
    attributes = case.layout.attributes(case.activation_bits)
    return _model("PackedLinear", ["x", "weights", "bias"], attributes, constants, case)


def _model(op: str, inputs: list[str], attributes: dict[str, int], constants: list[Any], case: Case) -> Any:
    from onnx import TensorProto, helper

    node = helper.make_node(op, inputs, ["y"], domain=DOMAIN, **attributes)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, size])
        for name, size in (("x", case.shape[1]), ("y", case.shape[0]))
    ]
    graph = helper.make_graph([node], "op", infos[:-1], infos[-1:], constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@cache
def core() -> Any:
    """An OpenVINO core that knows our ops."""
    import openvino

    from trtforge.plugins import cpu

    core = openvino.Core()
    cpu.register(core)
    return core
