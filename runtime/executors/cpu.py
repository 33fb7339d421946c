"""The CPU executor: owns the KV pools, and runs steps on one of two hosts.

Engines whose layers are all packed run on the native host (plugins/cpu/native_host.py), others on OpenVINO.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import cpu as plugin
from trtforge.plugins.cpu.native_host import NativeHost
from trtforge.plugins.cpu.openvino_host import OpenVINOHost
from trtforge.plugins.cpu.program import PROGRAM_FILE, WEIGHTS_FILE, Program
from trtforge.plugins.errors import EngineFormatError, EnvironmentProblem
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import KVLayout, Manifest

#: Alignment of the pools, bytes: a page, so that a block never shares one with other data.
_PAGE = 4096

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def open_executor(engine_dir: Path, manifest: Manifest, threads: int | None = None) -> "CpuExecutor":
    """Map the engine's weights and make it ready. threads: None means the CPUs that this process may use.

    Raises EngineFormatError for an engine of other versions of what runs it, or with a damaged graph.
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
    """An `Executor` on this machine's CPUs. A row's logits do not depend on the step's other rows."""

    def __init__(self, engine_dir: Path, manifest: Manifest, threads: int) -> None:
        self.manifest = manifest
        self.host = open_host(engine_dir, manifest, threads)
        check_sizes(self.host.sizes(), manifest, engine_dir)
        self.pools: dict[str, NDArray[Any]] = {}  # by the graph's input name; `verify` looks into them
        self._arrays: StepArrays | None = None  # of the step before
        self._named: dict[str, NDArray[Any]] = {}

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the pools. Their pages are zero, and take memory only when they are first written."""
        assert not self.pools and len(num_blocks) == len(self.manifest.kv.groups)
        self.pools.update(pools(self.manifest.kv, num_blocks))
        for g in range(len(num_blocks)):
            self.host.bind_pool(g, self.pools[f"kv_pool.{g}"], self.pools.get(f"kv_scales.{g}"))

    def run(self, arrays: StepArrays, meanwhile: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """One step. The logits lie in the host's own memory until the next one; nothing is copied."""
        assert self.pools, "allocate first"
        meanwhile()  # neither host can be launched and then waited for
        if arrays is not self._arrays:
            self._arrays, self._named = arrays, dict(named(arrays))
        return self.host.run(self._named)

    def close(self) -> None:
        self.host.close()
        self.pools.clear()


def open_host(engine_dir: Path, manifest: Manifest, threads: int) -> NativeHost | OpenVINOHost:
    """What runs this engine. Raises EngineFormatError for one that is damaged or of other versions."""
    file, weights = engine_dir / PROGRAM_FILE, engine_dir / WEIGHTS_FILE
    if not file.is_file():
        check_versions(plugin.versions(), manifest, engine_dir)
        return OpenVINOHost(engine_dir, threads)
    check_versions(plugin.native_versions(), manifest, engine_dir)
    try:
        text, size = file.read_text(encoding="utf-8"), weights.stat().st_size
    except (OSError, UnicodeDecodeError) as e:
        raise EngineFormatError(f"{engine_dir}: cannot be read ({e}); build the engine again") from e
    program = Program.from_json(text, file, size)
    return NativeHost(program, weights, manifest.kv.tokens_per_block, threads)


def check_versions(here: Mapping[str, str], manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineFormatError unless the engine was built for what is here."""
    for part, version in here.items():
        built = manifest.versions.get(part)
        if built != version:
            raise EngineFormatError(
                f"{engine_dir}: built for {part} {built}, here is {version}; build the engine again"
            )


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


def check_sizes(found: Mapping[str, tuple[int, ...]], manifest: Manifest, engine_dir: Path) -> None:
    """Raise EngineFormatError unless the graph's pools, rotations and logits have the manifest's sizes.

    Pools of another layout would be read and written past their ends.
    """
    wanted = {name: shape for name, _, shape in pool_rows(manifest.kv)}
    wanted |= {f"cos_sin.{r}": (rope.rotary_dim,) for r, rope in enumerate(manifest.ropes)}
    wanted["logits"] = (manifest.vocab_size,)
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
