"""The CPU executor: OpenVINO runs the engine's graph, our ops write K and V into the pools that this owns."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import cpu as plugin
from trtforge.plugins.errors import EngineFailure, EngineFormatError, EnvironmentProblem, ForgeError
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import KVLayout, Manifest

#: Alignment of the pools, bytes: a page, so that a block never shares one with other data.
_PAGE = 4096

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def open_executor(engine_dir: Path, manifest: Manifest, threads: int | None = None) -> "CpuExecutor":
    """Map and compile the engine's graph. threads: None means the CPUs that this process may use.

    Raises EngineFormatError for an engine of another OpenVINO version or a damaged graph.
    """
    return CpuExecutor(engine_dir, manifest, threads or available_cpus())


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, and the container's quota rounded up."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return cpus if quota == "max" else max(1, min(cpus, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2
        return cpus


class CpuExecutor:
    """An `Executor` on OpenVINO. A row's logits do not depend on the step's other rows."""

    def __init__(self, engine_dir: Path, manifest: Manifest, threads: int) -> None:
        import openvino

        for part, here in plugin.versions().items():
            built = manifest.versions.get(part)
            if built != here:
                raise EngineFormatError(
                    f"{engine_dir}: built for {part} {built}, here is {here}; build the engine again"
                )
        self.manifest = manifest
        core = openvino.Core()
        plugin.register(core)
        try:
            model = core.read_model(engine_dir / "model.xml")  # the weights stay mapped from model.bin
            compiled = core.compile_model(model, "CPU", properties(threads))
        except RuntimeError as e:
            raise load_error(engine_dir, e) from e
        check_graph(compiled, manifest, engine_dir)
        self._tensor = openvino.Tensor
        self._compiled: Any = compiled
        self._request: Any = compiled.create_infer_request()
        self.pools: dict[str, NDArray[Any]] = {}  # by the graph's input name; `verify` looks into them
        self._inputs: list[NDArray[Any]] = []  # of the last step: OpenVINO reads them where they lie

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the pools. Their pages are zero, and take memory only when they are first written."""
        assert not self.pools and len(num_blocks) == len(self.manifest.kv.groups)
        for name, pool in pools(self.manifest.kv, num_blocks):
            self.pools[name] = pool
            self._request.set_tensor(name, self._tensor(pool, shared_memory=True))

    def run(self, arrays: StepArrays) -> NDArray[np.float32]:
        """One step. The logits lie in OpenVINO's own memory until the next one; nothing is copied."""
        assert self.pools, "allocate first"
        self._inputs.clear()
        for name, array in named(arrays):
            self._inputs.append(array)
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
        self._request = self._compiled = None
        self._inputs.clear()
        self.pools.clear()


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


def pools(kv: KVLayout, num_blocks: Sequence[int]) -> Iterator[tuple[str, NDArray[Any]]]:
    """(input name, zeroed page-aligned memory) of each pool."""
    for name, dtype, rest in pool_rows(kv):
        shape = (num_blocks[int(name.rpartition(".")[2])], *rest)
        try:
            pool = _aligned(dtype, shape)
        except MemoryError as e:  # past a limit of the address space; what is free was looked at before
            size = math.prod(shape) * dtype.itemsize
            raise EnvironmentProblem(
                f"{name}: no memory for its {size} bytes; ask for a smaller KV pool, or raise the limit of this "
                "process (ulimit -v)"
            ) from e
        yield name, pool


def pool_rows(kv: KVLayout) -> Iterator[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    """(input name, dtype, shape of one block): kv_pool.{g} u8 [layers, 2, kv_heads, tokens_per_block,
    head_size * bytes] and, for a quantized cache, kv_scales.{g} FP32 [..., scales]."""
    dtype = KV_DTYPES[kv.dtype]
    for g, group in enumerate(kv.groups):
        rows = (len(group.layers), 2, group.kv_heads, kv.tokens_per_block)
        yield f"kv_pool.{g}", np.dtype(np.uint8), (*rows, group.head_size * dtype.bytes)
        if dtype.scales:
            yield f"kv_scales.{g}", np.dtype(np.float32), (*rows, dtype.scales)


def load_error(engine_dir: Path, error: RuntimeError) -> ForgeError:
    """What OpenVINO's refusal to load an engine means for people."""
    reason = _reason(error)
    what = f"{engine_dir}: OpenVINO cannot load it ({reason})"
    if "alloc" in reason:  # it has no class of its own for this
        return EnvironmentProblem(f"{what}; free memory, or raise the limit of this process")
    return EngineFormatError(f"{what}; build the engine again")


def check_graph(compiled: Any, manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineFormatError unless the graph's pools, rotations and logits have the manifest's sizes.

    Pools of another layout would be read and written past their ends.
    """
    wanted = {name: shape for name, _, shape in pool_rows(manifest.kv)}
    wanted |= {f"cos_sin.{r}": (rope.rotary_dim,) for r, rope in enumerate(manifest.ropes)}
    wanted["logits"] = (manifest.vocab_size,)
    ports = {port.any_name: port for port in (*compiled.inputs, *compiled.outputs)}
    found = {
        name: tuple(size.get_length() for size in list(port.partial_shape)[1:])
        for name, port in ports.items()
        if name.startswith(("kv_pool.", "kv_scales.", "cos_sin.", "logits"))
    }
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise EngineFormatError(
                f"{engine_dir}: {name} is {found.get(name)} in the graph, {wanted.get(name)} by the manifest; "
                "build the engine again"
            )


def named(arrays: StepArrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """The step's arrays under the graph's input names."""
    yield "token_ids", arrays.token_ids
    yield "positions", arrays.positions
    yield from ((f"cos_sin.{r}", a) for r, a in enumerate(arrays.cos_sin))
    yield from ((f"slot_mapping.{g}", a) for g, a in enumerate(arrays.slot_mapping))
    yield "query_start", arrays.query_start
    yield "kv_lengths", arrays.kv_lengths
    yield from ((f"block_tables.{g}", a) for g, a in enumerate(arrays.block_tables))
    yield "logit_rows", arrays.logit_rows


def _aligned(dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros that start on a page. Of large ones only the pages that are touched take memory."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.zeros(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + size].view(dtype).reshape(shape)


def _reason(error: Exception) -> str:
    """OpenVINO's messages are pages; their last line says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
