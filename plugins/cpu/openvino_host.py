"""The OpenVINO host: runs any lowered graph, our ops through the extension."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.plugins import cpu as plugin
from trtforge.plugins.errors import EngineFailure, EngineFormatError, EnvironmentProblem, ForgeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class OpenVINOHost:
    """A graph that is compiled and ready to run. Raises EngineFormatError for one that OpenVINO cannot load."""

    def __init__(self, engine_dir: Path, threads: int) -> None:
        import openvino

        core = openvino.Core()
        plugin.register(core)
        try:
            model = core.read_model(engine_dir / "model.xml")  # the weights stay mapped from model.bin
            compiled = core.compile_model(model, "CPU", properties(threads))
        except RuntimeError as e:
            raise load_error(engine_dir, e) from e
        self._tensor = openvino.Tensor
        self._compiled: Any = compiled
        self._request: Any = compiled.create_infer_request()
        self._inputs: Mapping[str, NDArray[Any]] = {}  # of the last step: OpenVINO reads them where they lie

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs and outputs whose sizes a manifest has too: without the first dimension, by name."""
        ports = {port.any_name: port for port in (*self._compiled.inputs, *self._compiled.outputs)}
        return {
            name: tuple(size.get_length() for size in list(port.partial_shape)[1:])
            for name, port in ports.items()
            if name.startswith(("kv_pool.", "kv_scales.", "cos_sin.", "logits"))
        }

    def bind_pool(self, group: int, rows: NDArray[np.uint8], scales: NDArray[np.float32] | None) -> None:
        """rows [num_blocks, layers, 2, kv_heads, tokens_per_block, row bytes] of a KV group, written in place."""
        self._request.set_tensor(f"kv_pool.{group}", self._tensor(rows, shared_memory=True))
        if scales is not None:
            self._request.set_tensor(f"kv_scales.{group}", self._tensor(scales, shared_memory=True))

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Logits [R, vocab_size] of one step, OpenVINO's own memory until the next one; nothing is copied.

        arrays: the graph's inputs by name (docs/graph.md). Raises EngineFailure.
        """
        self._inputs = arrays
        for name, array in arrays.items():
            self._request.set_tensor(name, self._tensor(array, shared_memory=True))
        try:
            self._request.infer()
        except RuntimeError as e:
            raise EngineFailure(f"the step failed in OpenVINO: {_reason(e)}") from e
        logits: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return logits

    def runtime_model(self) -> Any:
        """OpenVINO's model of what it really executes, for inspection."""
        return self._compiled.get_runtime_model()

    def close(self) -> None:
        """Safe to call twice."""
        self._request = self._compiled = None
        self._inputs = {}


def properties(threads: int) -> dict[str, Any]:
    """FP32 arithmetic whose rows do not depend on each other; threads are not pinned, our ops share them."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "ENABLE_CPU_PINNING": False,
    }


def load_error(engine_dir: Path, error: RuntimeError) -> ForgeError:
    """What OpenVINO's refusal to load an engine means for people."""
    reason = _reason(error)
    what = f"{engine_dir}: OpenVINO cannot load it ({reason})"
    if "alloc" in reason:  # it has no class of its own for this
        return EnvironmentProblem(f"{what}; free memory, or raise the limit of this process")
    return EngineFormatError(f"{what}; build the engine again")


def _reason(error: Exception) -> str:
    """OpenVINO's messages are pages; their last line says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
