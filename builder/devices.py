"""Devices that a plan can be made for; the GPUs are those of gpus.toml."""

import difflib
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trtforge.plugins.errors import InvalidArgument

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
