from pathlib import Path

import pytest
import toy

from trtforge.plugins.errors import EnvironmentProblem, InvalidArgument
from trtforge.runtime import config
from trtforge.runtime.config import EngineConfig
from trtforge.runtime.manifest import Limits

LIMITS = Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=100)


def blocks(available: int = 1 << 30, **fields: int) -> tuple[int, ...]:
    m = toy.manifest(16, (None, 8), LIMITS)
    assert m.kv.block_bytes(0) == 16 * 2 * 2 * 4  # K and V, head size 2, fp32: 256 bytes, in two groups 512
    return EngineConfig(**fields).num_blocks(m, lambda: available)


def test_the_ways_to_size_the_pool() -> None:
    assert blocks(kv_memory=5 * 512 + 511) == (5, 5)
    assert blocks(kv_cache_tokens=48) == (3, 3)
    assert blocks(kv_cache_tokens=49) == (4, 4)
    assert blocks(users=3, context=33) == (9, 9)


def test_the_default_holds_a_full_batch_or_half_of_the_memory() -> None:
    assert blocks() == (4 * 7, 4 * 7)
    assert blocks(available=20 * 512) == (10, 10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_memory": 511}, ["511 bytes", "512 bytes", "max_seq_len 100 takes 7"]),
        ({"kv_memory": 0}, ["kv_memory must be at least 1"]),
        ({"kv_memory": 1, "kv_cache_tokens": 1}, ["kv_memory and kv_cache_tokens", "give one"]),
        ({"users": 1}, ["users and context", "give both"]),
        ({"context": 1}, ["users and context", "give both"]),
        ({"users": 1, "context": 101}, ["context 101", "max_seq_len 100"]),
        ({"max_batch_size": 5}, ["max_batch_size 5", "at most 4", "--max-batch-size 5"]),
        ({"max_seq_len": 101}, ["max_seq_len 101", "at most 100"]),
        ({"max_num_tokens": 0}, ["max_num_tokens must be at least 1"]),
        (
            {"kv_cache_tokens": 1 << 26},
            ["4194304 KV blocks", "2147483648 bytes", "1073741824 bytes of memory"],
        ),
        ({"threads": 0}, ["threads must be at least 1"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_numbers(fields: dict[str, int], words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        blocks(**fields)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_policy_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="guaranteed_no_evict"):
        EngineConfig(policy="static")


def test_limits_are_the_engines_unless_lowered() -> None:
    assert EngineConfig().limits(LIMITS) == LIMITS
    assert EngineConfig(max_seq_len=50, max_batch_size=2).limits(LIMITS) == Limits(2, 64, 50)
    assert EngineConfig(max_num_tokens=3).limits(LIMITS).max_batch_size == 3, "a row has a token at least"


def test_available_memory_minds_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    monkeypatch.setattr(config, "_MEMINFO", meminfo)
    monkeypatch.setattr(config, "_CGROUP", cgroup)
    meminfo.write_text("MemTotal:       8000 kB\nMemAvailable:   5000 kB\nHugePages_Total:  0\n")
    assert config.available_memory() == 5000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    assert config.available_memory() == 5000 * 1024
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.current").write_text("2500000\n")
    (cgroup / "memory.stat").write_text("anon 100\ninactive_file 400000\n")
    assert config.available_memory() == 900_000
    meminfo.write_text("MemTotal: 8000 kB\n")
    with pytest.raises(EnvironmentProblem, match="kv_memory"):
        config.available_memory()
    assert config._fields(Path("/proc/meminfo"))["MemAvailable"] > 0
