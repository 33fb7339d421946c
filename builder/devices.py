"""Devices that a plan can be made for: the GPUs of gpus.toml, and this machine's CPU."""

import difflib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trtforge.plugins.errors import EnvironmentProblem, InvalidArgument

#: Of a GPU's memory, what is left after CUDA's context and fragmentation.
GPU_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """memory: bytes for weights, workspace and cache; bandwidth: bytes per second; sm: None for a CPU."""

    name: str
    memory: int
    bandwidth: float
    sm: int | None = None

    @property
    def float_bytes(self) -> int:
        """Of one unquantized weight or activation: the CPU computes in FP32, a GPU in FP16."""
        return 4 if self.sm is None else 2


def gpus() -> dict[str, Device]:
    """The GPUs that plan knows, from gpus.toml beside this module."""
    tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text())
    return {
        name: Device(name, int(gpu["memory"] * GPU_SHARE * 2**30), gpu["bandwidth"] * 1e9, gpu["sm"])
        for name, gpu in table.items()
    }


def gpu(name: str) -> Device:
    """By name, whatever its case. Raises InvalidArgument with the nearest and all names."""
    by_name = {known.lower(): device for known, device in gpus().items()}
    if name.lower() not in by_name:
        nearest = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.0)
        raise InvalidArgument(
            f"GPU {name!r} is unknown; nearest: {by_name[nearest[0]].name}; all: {', '.join(gpus())}"
        )
    return by_name[name.lower()]


def available_memory() -> int:
    """Bytes of this machine that can be had without swapping; no more than the control group allows."""
    limit = sys.maxsize
    try:
        meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limit = int(meminfo["MemAvailable"].split()[0]) << 10
        group = Path("/sys/fs/cgroup/memory.max")
        if group.is_file() and group.read_text().strip() != "max":
            limit = min(limit, int(group.read_text()))
    except (OSError, KeyError, ValueError) as e:
        raise EnvironmentProblem(f"cannot tell how much memory is free here ({e}); give --memory") from e
    return limit


def this_machine() -> Device:
    """The CPU here: the memory that is free now, and the bandwidth measured now (a third of a second)."""
    return Device("this machine's CPU", available_memory(), memory_bandwidth())


def memory_bandwidth(repeats: int = 3) -> float:
    """Bytes per second that all cores together read: the best of some passes over more than any cache."""
    import numpy as np

    cores = len(os.sched_getaffinity(0))
    arrays = [np.ones(1 << 24, np.int64) for _ in range(cores)]  # 128 MB each
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.max, arrays))  # the interpreter's lock is released inside
            best = max(best, cores * arrays[0].nbytes / (time.perf_counter() - start))
    return best
