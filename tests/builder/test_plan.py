"""plan: its sizes against the formulas of the layout and against what a built engine has; its refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest

from trtforge.builder import devices
from trtforge.builder.build import build
from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.cli import this_machine
from trtforge.builder.plan import plan
from trtforge.builder.spec import BuildConfig, ModelSpec
from trtforge.builder.translate import translate
from trtforge.plugins.errors import InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.manifest import Limits

CPU = devices.Device("a CPU", memory=1 << 30, bandwidth=10e9)


def spec_of(directory: Path, max_seq_len: int = 64) -> ModelSpec:
    checkpoint = open_checkpoint(directory)
    try:
        return translate(checkpoint, max_seq_len).spec
    finally:
        checkpoint.close()


@pytest.fixture(scope="module")
def spec(tiny_checkpoint: Callable[[str], Path]) -> ModelSpec:
    """hidden 64, inner 96, 2 layers, 4 heads and 2 KV heads of 16, vocabulary 288, untied."""
    return spec_of(tiny_checkpoint("llama"))


CONFIG = BuildConfig(recipe="full_prec", kv_cache_dtype="fp16", limits=Limits(max_seq_len=64))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_kv_bytes_per_token(spec: ModelSpec, dtype: str) -> None:
    layers, heads, size = 2, 2, 16
    scales = 4 if dtype in ("int8", "fp8") else 0
    element = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}[dtype]
    answer = plan(spec, replace(CONFIG, kv_cache_dtype=dtype), CPU)
    assert answer.kv_bytes_per_token == layers * 2 * heads * (size * element + scales)
    assert next(k for k in answer.kv_dtypes if k.name == dtype).bytes_per_token == answer.kv_bytes_per_token


def test_weights_per_recipe(spec: ModelSpec) -> None:
    linears = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    rows = 2 * (64 * 2 + 32 * 2 + 96 * 2 + 64)
    table, vectors = 288 * 64, 5 * 64
    sizes = {r.name: r.weight_bytes for r in plan(spec, CONFIG, CPU).recipes}
    assert sizes["full_prec"] == 4 * (linears + 2 * table + vectors) == 4 * spec.num_parameters()
    tables = 2 * (table + 4 * 288)  # of eight bits, embedding and head
    assert sizes["int8_wo"] == linears + 4 * rows + tables + 4 * vectors
    # Groups of 64 where the input is 64, of 32 where it is 96; a scale and a minimum of four bytes each.
    groups = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64 * 3)
    assert sizes["int4_wo"] == linears // 2 + groups * 8 + tables + 4 * vectors


@pytest.mark.parametrize(
    "recipe",
    [
        "full_prec",
        "int8_wo",
        "int4_wo",
        'weights = "int8"\ngroup_size = 32\nsymmetric = true',
        'weights = "int8"\n',
        'weights = "int4"\nexclude = ["lm_head", "layers.1.mlp.up"]',
    ],
)
@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 80}, {"tie_word_embeddings": True, "vocab_size": 2000}], ids=str
)
def test_weights_are_as_many_bytes_as_an_engine_has(
    recipe: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """No group of INT4 divides 80: such linears have eight bits."""
    model = checkpoints.save("llama", tmp_path / "model", **sizes, head_dim=16)
    if "=" in recipe:
        (tmp_path / "mine.toml").write_text(recipe)
        recipe = str(tmp_path / "mine.toml")
    config = replace(CONFIG, recipe=recipe)
    build(model, tmp_path / "engine", config)
    (file,) = (tmp_path / "engine").glob("*.bin")
    written = file.stat().st_size
    planned = plan(spec_of(model), config, CPU).weight_bytes
    assert planned <= written < planned + 2500  # constants of the graph; each tensor starts a cache line


def test_blocks_and_users_follow_from_the_memory(spec: ModelSpec) -> None:
    answer = plan(spec, CONFIG, CPU)
    block = 16 * answer.kv_bytes_per_token
    free = CPU.memory - answer.weight_bytes - answer.workspace_bytes
    assert answer.num_blocks == free // block
    assert answer.kv_tokens == 16 * answer.num_blocks
    [context] = answer.contexts
    assert context.context == 64
    assert context.users == answer.num_blocks // 4
    assert context.batch == 32
    read = (
        answer.weight_bytes - 4 * 288 * 64 + 32 * 64 * answer.kv_bytes_per_token
    )  # embeddings are looked up
    assert context.step_seconds == pytest.approx(read / 10e9)
    assert not answer.impossible


def test_a_window_bounds_what_attention_reads_but_not_what_the_pool_holds(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    whole, windowed = (
        plan(spec_of(tiny_checkpoint(name)), CONFIG, CPU).contexts[0]
        for name in ("mistral", "mistral-window")
    )
    assert windowed.users == whole.users
    assert windowed.step_seconds < whole.step_seconds


def test_memory_too_small_for_the_weights(spec: ModelSpec) -> None:
    answer = plan(spec, CONFIG, replace(CPU, memory=100_000))
    assert answer.num_blocks == 0
    assert [reason.split()[0] for reason in answer.impossible] == ["weights"]


def test_memory_too_small_for_one_request(spec: ModelSpec) -> None:
    roomy = plan(spec, CONFIG, CPU)
    memory = roomy.weight_bytes + roomy.workspace_bytes + 63 * roomy.kv_bytes_per_token
    [reason] = plan(spec, CONFIG, replace(CPU, memory=memory)).impossible
    assert "one request of 64 tokens" in reason
    assert "48 tokens" in reason


def test_a_gpu_without_bf16_arithmetic(spec: ModelSpec) -> None:
    answer = plan(spec, replace(CONFIG, kv_cache_dtype="bf16"), devices.gpu("t4"))
    assert "SM 75" in answer.impossible[0]
    assert not plan(spec, replace(CONFIG, kv_cache_dtype="bf16"), devices.gpu("A10")).impossible


def test_a_gpu_holds_weights_in_two_bytes(spec: ModelSpec) -> None:
    assert plan(spec, CONFIG, devices.gpu("L4")).weight_bytes == 2 * spec.num_parameters()


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="nearest: H200"):
        devices.gpu("h201")


def test_this_machine_is_measured() -> None:
    machine = this_machine()
    assert 1 << 20 < machine.memory < 1 << 50
    assert 1e8 < machine.bandwidth < 1e13


def test_the_plan_is_what_the_engine_has(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path]
) -> None:
    from trtforge.runtime import manifest

    built = manifest.load(tiny_engine("llama", kv_cache_dtype="int8", max_seq_len=64))
    answer = plan(spec_of(tiny_checkpoint("llama")), replace(CONFIG, kv_cache_dtype="int8"), CPU)
    assert answer.kv_bytes_per_token == built.kv.bytes_per_token
    assert answer.parameters == built.model["num_parameters"]
