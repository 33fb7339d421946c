"""EngineConfig: what an engine is opened with, and how many KV blocks that gives. Standard library only."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trtforge.plugins.errors import EnvironmentProblem, InvalidArgument
from trtforge.runtime.manifest import KVLayout, Limits, Manifest

#: The batch scheduler policies, under their old option names.
POLICIES = ("max_utilization", "guaranteed_no_evict")

#: Of the memory that is free when the engine opens, what the default pool may take.
MEMORY_SHARE = 0.5

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class EngineConfig:
    """How to run an engine. At most one of the three ways to size the KV pool is given; none means: enough
    for `max_batch_size` sequences of `max_seq_len`, but no more than half of the machine's available memory.

    kv_memory: bytes for all pools together. kv_cache_tokens: tokens that the pool holds.
    users, context: that many requests of that many tokens each, prompt and output.
    max_batch_size, max_num_tokens, max_seq_len: lower than the engine's own limits, or None for those.
    policy: `max_utilization` admits by what a request needs now and preempts the newest when the pool runs
    out; `guaranteed_no_evict` admits by the full need (prompt + max_tokens) and never preempts.
    max_queue_requests, max_queue_tokens: bounds of the waiting queue; None: unbounded.
    threads: CPU threads of the executor; None: those that this process may use.
    check_integrity: state the invariants of scheduler and pool after every step (tests, debugging).
    """

    kv_memory: int | None = None
    kv_cache_tokens: int | None = None
    users: int | None = None
    context: int | None = None
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    policy: str = "max_utilization"
    max_queue_requests: int | None = 1024
    max_queue_tokens: int | None = None
    threads: int | None = None
    check_integrity: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidArgument(f"policy {self.policy!r}: must be one of {', '.join(POLICIES)}")
        if (self.users is None) != (self.context is None):
            raise InvalidArgument("users and context size the KV pool together; give both")
        ways = [w for w in ("kv_memory", "kv_cache_tokens", "users") if getattr(self, w) is not None]
        if len(ways) > 1:
            raise InvalidArgument(f"{' and '.join(ways)} both size the KV pool; give one")
        for name in (*ways, "context", "threads", "max_batch_size", "max_num_tokens", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {value}")

    def limits(self, engine: Limits) -> Limits:
        """The limits in force. Raises InvalidArgument for one above what the engine was built with."""
        asked = {n: getattr(self, n) for n in ("max_batch_size", "max_num_tokens", "max_seq_len")}
        for name, value in asked.items():
            if value is not None and value > getattr(engine, name):
                raise InvalidArgument(
                    f"{name} {value}: the engine was built for at most {getattr(engine, name)}; "
                    f"build it again with --{name.replace('_', '-')} {value}"
                )
        limits = replace(engine, **{n: v for n, v in asked.items() if v is not None})
        # Every request in a step has at least one token in it, so a larger batch could not be scheduled.
        return replace(limits, max_batch_size=min(limits.max_batch_size, limits.max_num_tokens))

    def num_blocks(self, manifest: Manifest, available: Callable[[], int] | None = None) -> tuple[int, ...]:
        """Blocks of each KV group's pool. Without a way to free what has left a window, every group needs the
        same number.

        available: gives the bytes that there are; None: this machine's memory. Raises InvalidArgument, with the
        numbers, if the pools would be less than one block, or more than there is memory.
        """
        available = available or available_memory
        kv, limits = manifest.kv, self.limits(manifest.limits)
        bytes_per_block = sum(kv.block_bytes(g) for g in range(len(kv.groups)))
        if self.kv_memory is not None:
            blocks = self.kv_memory // bytes_per_block
            given = f"kv_memory {self.kv_memory} bytes"
        elif self.kv_cache_tokens is not None:
            blocks = blocks_for(kv, self.kv_cache_tokens)
            given = f"kv_cache_tokens {self.kv_cache_tokens}"
        elif self.users is not None and self.context is not None:
            if self.context > limits.max_seq_len:
                raise InvalidArgument(
                    f"context {self.context} is longer than max_seq_len {limits.max_seq_len}"
                )
            blocks = self.users * blocks_for(kv, self.context)
            given = f"{self.users} users x {self.context} tokens"
        else:
            memory = int(available() * MEMORY_SHARE)
            full = limits.max_batch_size * blocks_for(kv, limits.max_seq_len)
            blocks = min(full, memory // bytes_per_block)
            given = f"half of the available memory ({memory} bytes)"
        if blocks < 1:
            raise InvalidArgument(
                f"{given} is less than a KV block of {kv.tokens_per_block} tokens ({bytes_per_block} bytes); "
                f"max_seq_len {limits.max_seq_len} takes {blocks_for(kv, limits.max_seq_len)} of them"
            )
        size, there = blocks * bytes_per_block, available()
        if size > there:
            raise InvalidArgument(
                f"{given} is {blocks} KV blocks, {size} bytes, and {there} bytes of memory are available; "
                "ask for fewer, or for another KV dtype when the engine is built"
            )
        return (blocks,) * len(kv.groups)


def blocks_for(kv: KVLayout, tokens: int) -> int:
    """Blocks that hold so many tokens of one sequence, in one group."""
    return -(-tokens // kv.tokens_per_block)


def available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, and what a container's limit leaves."""
    meminfo = _fields(_MEMINFO)
    if "MemAvailable" not in meminfo:
        raise EnvironmentProblem(
            f"{_MEMINFO} has no MemAvailable; say how large the KV pool is with kv_memory"
        )
    available = meminfo["MemAvailable"] * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            cache = _fields(_CGROUP / "memory.stat").get("inactive_file", 0)  # given up when memory is wanted
            available = min(available, int(limit) - int((_CGROUP / "memory.current").read_text()) + cache)
    except (OSError, ValueError):
        pass  # no cgroup v2, so no limit that could be read
    return max(0, available)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines like `name: 12 kB` or `name 12`."""
    words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
