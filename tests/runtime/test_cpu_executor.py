"""Built engines through the CPU executor: transformers' logits, rows that do not depend on each other, and what
OpenVINO really executes."""

import inspect
import json
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from stepping import Logits, Stepper

from trtforge.plugins.cpu import openvino_host
from trtforge.plugins.errors import EngineFailure, EngineFormatError, EnvironmentProblem
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.executors import cpu, open_executor

Make = Callable[..., Path]


@contextmanager
def stepper(engine: Path, num_blocks: int = 48, threads: int = 2) -> Iterator[Stepper]:
    executor = open_executor(engine, threads=threads)
    try:
        yield Stepper(executor, num_blocks)
    finally:
        executor.close()


def greedy(steps: Stepper, prompt: list[int], length: int) -> tuple[list[int], Logits]:
    """All tokens after greedy decoding to `length`, and the logits of every row that was computed."""
    sequence, ids, rows = steps.new(), list(prompt), []
    fed = 0
    while fed < length:
        new = ids[fed:]
        rows.append(steps.step([(sequence, new, len(new))])[0])
        fed += len(new)
        ids.append(int(rows[-1][-1].argmax()))
    return ids[:length], np.concatenate(rows)


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    variant: str, tiny_checkpoint: Callable[[str], Path], tiny_engine: Make
) -> None:
    """Half of the length as a prompt, the other half decoded: past the window and the original context."""
    import torch

    length = checkpoints.VARIANTS[variant].length
    # A rotation that depends on the length is fixed for max_seq_len, so this is what the reference must see too.
    engine = tiny_engine(variant, kv_cache_dtype="fp32", tokens_per_block=8, max_seq_len=length)
    with stepper(engine) as steps:
        ids, logits = greedy(steps, checkpoints.prompt_ids(length // 2), length)
    with torch.no_grad():
        wanted = checkpoints.reference(tiny_checkpoint(variant))(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(wanted).max() > 1, "logits that say nothing"
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=2e-4)
    chosen = slice(length // 2 - 1, length - 1)
    assert wanted[chosen].argmax(-1).tolist() == ids[length // 2 :]


@pytest.mark.parametrize(
    ("kv_dtype", "recipe", "activations"),
    [
        *((kv_dtype, "full_prec", "auto") for kv_dtype in KV_DTYPES),
        *(("fp16", recipe, kind) for recipe in ("int8_wo", "int4_wo") for kind in ("int8", "fp32")),
    ],
)
def test_rows_do_not_depend_on_each_other(
    kv_dtype: str, recipe: str, activations: str, tiny_engine: Make
) -> None:
    """Bit for bit the same: alone, in chunks, beside other requests, one row or several rows of logits."""
    engine = tiny_engine(
        "llama", kv_cache_dtype=kv_dtype, tokens_per_block=8, recipe=recipe, activations=activations
    )
    with stepper(engine) as steps:
        prompts = [checkpoints.prompt_ids(n, seed=n) for n in (61, 5, 33, 1)]
        alone = [steps.logits(prompt) for prompt in prompts]
        for chunk in (1, 2, 7, 32):
            for prompt, wanted in zip(prompts, alone, strict=True):
                assert np.array_equal(steps.logits(prompt, chunk), wanted), chunk
        sequences, counts = [steps.new() for _ in prompts], [0] * len(prompts)
        chunks = iter([3, 1, 8, 1, 17, 5, 2, 1, 30, 6] * 20)
        while any(c < len(p) for c, p in zip(counts, prompts, strict=True)):
            rows, wanted_rows = [], []
            for i, prompt in enumerate(prompts):
                new = prompt[counts[i] : counts[i] + next(chunks)]
                if new:
                    logits = 1 if i % 2 else len(new)
                    rows.append((sequences[i], new, logits))
                    counts[i] += len(new)
                    wanted_rows.append(alone[i][counts[i] - logits : counts[i]])
            for got, wanted in zip(steps.step(rows), wanted_rows, strict=True):
                assert np.array_equal(got, wanted)


def test_rows_do_not_depend_on_the_number_of_threads(tiny_engine: Make) -> None:
    engine = tiny_engine("llama", kv_cache_dtype="fp16", tokens_per_block=8)
    prompt = checkpoints.prompt_ids(61)
    with stepper(engine, threads=1) as one, stepper(engine, threads=2) as two:
        assert np.array_equal(one.logits(prompt), two.logits(prompt))


@pytest.mark.parametrize("kv_dtype", [name for name in KV_DTYPES if name != "fp32"])
def test_smaller_caches_round_as_declared(
    kv_dtype: str, tiny_checkpoint: Callable[[str], Path], tiny_engine: Make
) -> None:
    """The same as transformers over a cache that rounds K and V when they are stored."""
    import torch

    prompt = checkpoints.prompt_ids(48)
    with stepper(tiny_engine("llama", kv_cache_dtype=kv_dtype, tokens_per_block=8)) as steps:
        logits = steps.logits(prompt)
    model = checkpoints.reference(tiny_checkpoint("llama"))
    # its name changes between versions of transformers
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        exact, rounded = (
            model(torch.tensor([prompt]), **{argument: cache}).logits[0].numpy()
            for cache in (None, rounding_cache(kv_dtype))
        )
    difference, rounding = np.abs(logits - rounded).max(), np.abs(exact - rounded).max()
    # A K or V that the two compute on different sides of a rounding boundary moves the logits a little.
    assert difference < 1e-3
    assert rounding > 20 * difference, "a comparison that would not see the rounding"


def rounding_cache(kv_dtype: str) -> Any:
    """A transformers cache that stores x / scale in a smaller type, with a scale per token and KV head."""
    import torch
    from transformers import DynamicCache

    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    dtype = KV_DTYPES[kv_dtype]

    def stored(x: Any) -> Any:  # [1, kv_heads, T, head_size]
        scale = x.abs().amax(-1, keepdim=True) / dtype.max if dtype.scales else torch.tensor(1.0)
        x = x / scale
        return (x.round() if kv_dtype == "int8" else x).to(types[kv_dtype]).float() * scale

    class Rounding(DynamicCache):
        def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(stored(key), stored(value), *args, **kwargs)

    return Rounding()


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-bias", "gemma3"])
@pytest.mark.parametrize("recipe", ["int8_wo", "int4_wo"])
def test_quantized_engine_computes_with_the_dequantized_weights(
    recipe: str, variant: str, tiny_checkpoint: Callable[[str], Path], tiny_engine: Make
) -> None:
    import torch

    prompt = checkpoints.prompt_ids(24)
    with stepper(tiny_engine(variant, recipe=recipe, kv_cache_dtype="fp32", activations="fp32")) as steps:
        logits = steps.logits(prompt)
    model = checkpoints.reference(tiny_checkpoint(variant))
    dequantize(model, recipe)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].numpy()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-3)


def dequantize(model: Any, recipe: str) -> None:
    """Round the linears of a torch model as the recipe stores them; a tied embedding goes with its head."""
    import torch

    from trtforge.builder import recipes
    from trtforge.builder.blocks import format_of, round_to_blocks

    quant = recipes.load(recipe)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach().numpy()
            graph_name = "lm_head.weight" if name == "lm_head" else name
            fmt = format_of(quant, graph_name, weight.shape[1], None)
        elif isinstance(module, torch.nn.Embedding):
            weight = module.weight.detach().numpy()
            fmt = format_of(quant, "embedding.weight", weight.shape[1], None)
        else:
            continue
        assert fmt
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(round_to_blocks(weight, fmt).values()))


def layers(executor: Any) -> list[tuple[str, str, str, Any]]:
    """(type, kernel, output's name, node) of what OpenVINO executes."""
    info = [(node, node.get_rt_info()) for node in executor.host.runtime_model().get_ordered_ops()]
    return [(i["layerType"].value, i["primitiveType"].value, n.get_friendly_name(), n) for n, i in info]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pools_are_read_and_written_where_they_lie(kv_dtype: str, tiny_engine: Make) -> None:
    """No pool is an output, and nothing but our ops reads one: not a conversion, not a copy."""
    with stepper(tiny_engine("mistral-window", kv_cache_dtype=kv_dtype, tokens_per_block=8)) as steps:
        steps.logits(checkpoints.prompt_ids(20))
        executed = layers(steps.executor)
        groups = len(steps.manifest.kv.groups) * (2 if KV_DTYPES[kv_dtype].scales else 1)
    assert [name for kind, _, name, _ in executed if kind == "Output"] == ["logits/sink_port_0"]
    pools = [node for kind, _, name, node in executed if kind == "Input" and name.startswith("kv_")]
    pools = [p for p in pools if p.get_friendly_name() != "kv_lengths"]
    assert len(pools) == groups
    for pool in pools:
        readers = [i.get_node().get_rt_info()["layerType"].value for i in pool.output(0).get_target_inputs()]
        assert set(readers) == {"Reference"}, f"{pool.get_friendly_name()} is read by {readers}"
        assert len(readers) == 2 * 2, "two ops in each of two layers"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 kernels")
@pytest.mark.parametrize("variant", ["llama", "llama-bias", "gemma3"])
def test_all_linears_run_with_the_kernel_whose_rows_are_independent(variant: str, tiny_engine: Make) -> None:
    """A linear with a fused activation would take another kernel for few rows than for many."""
    with stepper(tiny_engine(variant, kv_cache_dtype="fp32", tokens_per_block=8)) as steps:
        steps.logits(checkpoints.prompt_ids(20))
        kernels = Counter(kernel for kind, kernel, *_ in layers(steps.executor) if kind == "FullyConnected")
    assert kernels == {"gemm_mlas_f32": 4 * steps.manifest.model["num_layers"] + 1}


@pytest.mark.parametrize("recipe", ["int8_wo", "int4_wo"])
def test_weights_stay_compressed(recipe: str, tiny_engine: Make) -> None:
    """They are read packed from the mapped file, a tied embedding out of its head's."""
    engine = tiny_engine("llama-tied", recipe=recipe)
    full = (tiny_engine("llama-tied") / "model.bin").stat().st_size
    assert (engine / "weights.bin").stat().st_size < full * 0.4


def test_step_without_logits(tiny_engine: Make) -> None:
    with stepper(tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8)) as steps:
        prompt = checkpoints.prompt_ids(20)
        sequence = steps.new()
        assert steps.step([(sequence, prompt[:12], 0)])[0].shape == (0, steps.manifest.vocab_size)
        (rest,) = steps.step([(sequence, prompt[12:], 8)])
        assert np.array_equal(rest, steps.logits(prompt)[12:])


@pytest.mark.parametrize("recipe", ["full_prec", "int8_wo"])
def test_the_same_arrays_may_come_again_with_other_values(recipe: str, tiny_engine: Make) -> None:
    """As they do in most steps; and others in between, of other sizes."""
    engine = tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8, recipe=recipe)
    prompt = checkpoints.prompt_ids(12)
    with stepper(engine) as steps:
        wanted = steps.logits(prompt)
        sequence, run = steps.new(), steps.executor.run
        reused = steps.arrays([(sequence, prompt[:1], 1)])
        found = [run(reused).copy()]
        for i in range(1, 12):
            fresh = steps.arrays([(sequence, prompt[i : i + 1], 1)])
            if fresh.block_tables[0].shape != reused.block_tables[0].shape:
                reused = replace(reused, block_tables=fresh.block_tables)
            for name in ("token_ids", "positions", "kv_lengths"):
                getattr(reused, name)[:] = getattr(fresh, name)
            for mine, new in zip(
                (*reused.cos_sin, *reused.slot_mapping), (*fresh.cos_sin, *fresh.slot_mapping), strict=True
            ):
                mine[:] = new
            found.append(run(reused).copy())
            if i == 5:
                assert np.array_equal(steps.logits(prompt), wanted)
        assert np.array_equal(np.concatenate(found), wanted)


def test_failed_step_is_our_error_and_the_next_one_works(tiny_engine: Make) -> None:
    with stepper(tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8)) as steps:
        prompt = checkpoints.prompt_ids(9)
        wanted = steps.logits(prompt)
        arrays = steps.arrays([(steps.new(), prompt, 1)])
        with pytest.raises(EngineFailure, match="the step failed in OpenVINO") as failure:
            steps.executor.run(replace(arrays, slot_mapping=(arrays.slot_mapping[0][:-1],)))
        assert "\n" not in str(failure.value)
        assert np.array_equal(steps.logits(prompt), wanted)


@pytest.mark.parametrize(
    ("part", "recipe"), [("openvino", "full_prec"), ("ops", "full_prec"), ("ops", "int8_wo")]
)
def test_engine_of_another_version_is_refused(part: str, recipe: str, tiny_engine: Make) -> None:
    engine = tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8, recipe=recipe)
    manifest = manifest_format.load(engine)
    with pytest.raises(EngineFormatError, match=rf"built for {part} 0\.1, here is .*build the engine again"):
        open_executor(engine, replace(manifest, versions={**manifest.versions, part: "0.1"}))
    rest = {k: v for k, v in manifest.versions.items() if k != part}
    with pytest.raises(EngineFormatError, match=rf"built for {part} None, here is "):
        open_executor(engine, replace(manifest, versions=rest))


def test_damaged_graph_is_refused_in_one_line(tiny_engine: Make, tmp_path: Path) -> None:
    engine = shutil.copytree(tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8), tmp_path / "e")
    manifest = manifest_format.load(engine)
    graph = (engine / "model.xml").read_text()
    for damaged in (graph[: len(graph) // 2], graph.replace("PagedAttention", "Paged"), ""):
        (engine / "model.xml").write_text(damaged)
        with pytest.raises(EngineFormatError, match="build the engine again") as refused:
            open_executor(engine, manifest)
        assert "\n" not in str(refused.value)


def test_damaged_program_is_refused_in_one_line(tiny_engine: Make, tmp_path: Path) -> None:
    """The reader of programs has tests of its own; here it is how the executor comes to it."""
    engine = shutil.copytree(
        tiny_engine("llama", recipe="int8_wo", kv_cache_dtype="fp32", tokens_per_block=8), tmp_path / "e"
    )
    manifest, program = manifest_format.load(engine), (engine / "program.json").read_bytes()

    def refuse() -> None:
        with pytest.raises(EngineFormatError, match="build the engine again") as refused:
            open_executor(engine, manifest)
        assert "\n" not in str(refused.value)

    for damaged in (program[: len(program) // 2], b"\xff" + program, b""):
        (engine / "program.json").write_bytes(damaged)
        refuse()
    (engine / "program.json").write_bytes(program)
    open_executor(engine, manifest).close()
    (engine / "weights.bin").write_bytes((engine / "weights.bin").read_bytes()[:-64])
    refuse()
    (engine / "weights.bin").unlink()
    refuse()


def test_memory_that_is_not_to_be_had_is_no_fault_of_the_engine(tiny_engine: Make) -> None:
    executor = open_executor(tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8))
    try:
        with pytest.raises(EnvironmentProblem, match=r"^kv_pool\.0: no memory for its \d+ bytes; "):
            executor.allocate([2**45])
    finally:
        executor.close()
    said = RuntimeError("Exception from src/core.cpp:99:\nFailed to allocate 3538944 bytes of memory\n")
    error = openvino_host.load_error(Path("engine"), said)
    assert isinstance(error, EnvironmentProblem)
    assert str(error).startswith(
        "engine: OpenVINO cannot load it (Failed to allocate 3538944 bytes of memory)"
    )
    assert "build the engine again" not in str(error)


@pytest.mark.parametrize("recipe", ["full_prec", "int8_wo"])
def test_a_manifest_of_other_sizes_than_the_graph_is_refused(recipe: str, tiny_engine: Make) -> None:
    """Else our ops would write past the ends of the pools."""
    engine = tiny_engine("mistral-window", kv_cache_dtype="int8", tokens_per_block=8, recipe=recipe)
    assert (engine / "program.json").is_file() == (recipe == "int8_wo")
    manifest = manifest_format.load(engine)
    (group,) = manifest.kv.groups
    for name, wrong in {
        "kv_pool.0": replace(manifest, kv=replace(manifest.kv, tokens_per_block=4)),
        "kv_pool.1": replace(manifest, kv=replace(manifest.kv, groups=(group, group))),
        "kv_pool.0 ": replace(manifest, kv=replace(manifest.kv, groups=(replace(group, kv_heads=2**31),))),
        "kv_pool.0  ": replace(manifest, kv=replace(manifest.kv, dtype="fp16")),
        "cos_sin.0": replace(manifest, ropes=(replace(manifest.ropes[0], inv_freq=(1.0,)),)),
        "logits": replace(manifest, model={**manifest.model, "vocab_size": 287}),
    }.items():
        with pytest.raises(EngineFormatError, match=rf": {name.strip()} is .* build the engine again"):
            open_executor(engine, wrong)


def test_engine_for_another_target_is_refused(tiny_engine: Make) -> None:
    engine = tiny_engine("llama", kv_cache_dtype="fp32", tokens_per_block=8)
    manifest = replace(manifest_format.load(engine), target="abacus")
    with pytest.raises(EngineFormatError, match=r"made for target 'abacus'.*it runs: cpu, null"):
        open_executor(engine, manifest)


def test_cpus_are_those_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for text, wanted in (("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 8)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        monkeypatch.setattr(cpu, "_CGROUP_QUOTA", tmp_path / "cpu.max")
        assert cpu.available_cpus() == wanted, text
    monkeypatch.setattr(cpu, "_CGROUP_QUOTA", tmp_path / "absent")
    assert cpu.available_cpus() == 8


def test_pools_have_the_manifest_s_layout(tiny_engine: Make) -> None:
    for dtype in KV_DTYPES.values():
        kv = manifest_format.load(
            tiny_engine("mistral-window", kv_cache_dtype=dtype.name, tokens_per_block=8)
        ).kv
        blocks = [5] * len(kv.groups)
        made = dict(cpu.pools(kv, blocks))
        assert all(p.ctypes.data % 4096 == 0 and not p.any() for p in made.values())
        for g in range(len(kv.groups)):
            group = [made[f"kv_pool.{g}"], *([made[f"kv_scales.{g}"]] if dtype.scales else [])]
            assert sum(p.nbytes for p in group) == 5 * kv.block_bytes(g), json.dumps(list(made))
