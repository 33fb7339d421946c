"""The native host: instruction sets, threads, and steps whose indices are wrong."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from stepping import Stepper

from trtforge.plugins.cpu import native_host
from trtforge.plugins.errors import EngineFailure, EngineFormatError, EnvironmentProblem
from trtforge.runtime.executors import open_executor

Make = Callable[..., Path]


@pytest.fixture(params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tiny_engine: Make) -> Path:
    path = tiny_engine(request.param, recipe="int4_wo", activations="int8", tokens_per_block=8)
    assert (path / "program.json").is_file()
    return path


@contextmanager
def stepper(engine: Path, threads: int = 2) -> Iterator[Stepper]:
    executor = open_executor(engine, threads=threads)
    try:
        yield Stepper(executor, 48)
    finally:
        executor.close()


@contextmanager
def forced(isa: str) -> Iterator[bool]:
    library = native_host.library()
    try:
        yield bool(library.trtforge_host_force_isa(isa.encode()))
    finally:
        library.trtforge_host_force_isa(b"")


def test_structs_are_those_of_the_library() -> None:
    sizes = (ctypes.c_int64 * len(native_host.STRUCTS))()
    native_host.library().trtforge_host_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(s) for s in native_host.STRUCTS]


def test_instruction_sets_agree(engine: Path) -> None:
    """Products of integers are exact, so AVX2 and AVX-512 give the same bits."""
    found = {}
    for isa in ("generic", "avx2", "avx512"):
        with forced(isa) as there:
            if not there:
                continue
            with stepper(engine) as steps:
                found[isa] = steps.logits(checkpoints.prompt_ids(40))
    assert "generic" in found
    for isa, logits in found.items():
        # a last bit before activations are rounded moves some codes by one
        error = np.abs(logits - found["generic"]).max(axis=1) / np.abs(found["generic"]).max()
        assert error.max() <= 0.05 and np.median(error) <= 0.01, isa
    if "avx512" in found:
        np.testing.assert_array_equal(found["avx512"], found["avx2"])


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_do_not_matter(threads: int, engine: Path) -> None:
    """Of many regions, on more threads than there are cores too."""
    prompt = checkpoints.prompt_ids(33)
    with stepper(engine, threads=2) as two, stepper(engine, threads=threads) as steps:
        wanted = two.logits(prompt)
        for chunk in (0, 1, 5):
            np.testing.assert_array_equal(steps.logits(prompt, chunk), wanted)


def test_a_closed_host_leaves_no_thread(engine: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before, pools = count(), threading.active_count()
    executor = open_executor(engine, threads=4)
    assert count() == before + 3
    executor.close()
    executor.close()
    assert count() == before and threading.active_count() == pools


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", -1, "token_ids has one outside the vocabulary"),
        ("token_ids", 10**6, "token_ids has one outside the vocabulary"),
        ("logit_rows", 9, "logit_rows has one outside the step"),
        ("positions", 4000, "positions has one outside its sequence's kv_length"),
        ("kv_lengths", 4000, "kv_lengths has a length that the block table cannot hold"),
        ("slot_mapping", 48 * 8, "slot_mapping has a slot outside the pool"),
        ("slot_mapping", -1, "slot_mapping has a slot outside the pool"),
        ("block_tables", 48, "block_tables has a block outside the pool"),
    ],
)
def test_wrong_indices_are_refused_before_anything_is_written(
    field: str, value: int, message: str, engine: Path
) -> None:
    with stepper(engine) as steps:
        prompt = checkpoints.prompt_ids(9)
        wanted = steps.logits(prompt)
        arrays = steps.arrays([(steps.new(), prompt, 1)])
        pools: dict[str, Any] = {name: p.copy() for name, p in steps.executor.pools.items()}  # type: ignore[attr-defined]
        spoilt = getattr(arrays, field)
        if isinstance(spoilt, tuple):
            spoilt = tuple(part.copy() for part in spoilt)
            spoilt[-1].flat[-1] = value
        else:
            spoilt = spoilt.copy()
            spoilt[-1] = value
        with pytest.raises(EngineFailure, match=message):
            steps.executor.run(replace(arrays, **{field: spoilt}))
        for name, pool in steps.executor.pools.items():  # type: ignore[attr-defined]
            np.testing.assert_array_equal(pool, pools[name])
        np.testing.assert_array_equal(steps.logits(prompt), wanted)


def test_inputs_of_different_lengths_are_refused(engine: Path) -> None:
    with stepper(engine) as steps:
        arrays = steps.arrays([(steps.new(), checkpoints.prompt_ids(9), 1)])
        for field in ("positions", "query_start", "slot_mapping", "cos_sin", "block_tables"):
            given = getattr(arrays, field)
            short = tuple(part[:-1] for part in given) if isinstance(given, tuple) else given[:-1]
            with pytest.raises(EngineFailure, match=f"{field}.* rows, want"):
                steps.executor.run(replace(arrays, **{field: short}))


def test_a_program_of_other_sizes_than_the_manifest_is_refused(engine: Path, tmp_path: Path) -> None:
    import json
    import shutil

    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["kv"]["tokens_per_block"] *= 2
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineFormatError, match=r"kv_pool.0 is .* in the graph, .* by the manifest"):
        open_executor(copy)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, engine: Path) -> None:
    native_host.library.cache_clear()
    monkeypatch.setattr(native_host, "LIBRARY_NAME", "libmissing.so")
    with pytest.raises(EnvironmentProblem, match=r"libmissing.so: the CPU kernels are not compiled"):
        open_executor(engine)
    native_host.library.cache_clear()
