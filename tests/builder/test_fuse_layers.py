"""The native host: its fused layers give what the single ops that they are made of give on OpenVINO, for every family
and kind of cache, and what the graph's own definition gives."""

import logging
from collections.abc import Callable
from pathlib import Path

import checkpoints
import gguf_files
import numpy as np
import onnx_ir as ir
import pytest
from graph_runner import GraphRunner
from stepping import Logits, Stepper

from trtforge.builder.build import build
from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights
from trtforge.builder.passes import run_passes
from trtforge.builder.passes.fuse_decoder import fuse_decoder
from trtforge.builder.recipes import load
from trtforge.builder.spec import BuildConfig
from trtforge.builder.targets import cpu
from trtforge.builder.translate import translate
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.executors import open_executor
from trtforge.runtime.manifest import Limits

Checkpoint = Callable[[str], Path]

LENGTH = 40
#: Where K and V are rounded, a last bit before the cache moves a few codes by one, and the logits by more.
TOLERANCE = {"fp32": 2e-4, "fp16": 5e-3, "bf16": 0.05, "int8": 0.05, "fp8": 0.1}


def run(source: Path, output: Path, **config: str) -> tuple[bool, Logits]:
    """(whether the native host ran it, logits of a prompt in three chunks)"""
    manifest = build(source, output, BuildConfig(limits=Limits(max_seq_len=64), tokens_per_block=8, **config))
    native = (output / "program.json").is_file()
    files = {"program.json", "weights.bin"} if native else {"model.xml", "model.bin"}
    assert {name for name in manifest.files if name.startswith(("program", "weights", "model"))} == files
    assert set(manifest.versions) == {"trtforge", "ops"} | (set() if native else {"openvino"})
    executor = open_executor(output, threads=2)
    steps, prompt = Stepper(executor, 16), checkpoints.prompt_ids(LENGTH)
    sequence = steps.new()
    parts = [steps.step([(sequence, part, len(part))])[0] for part in (prompt[:9], prompt[9:33], prompt[33:])]
    executor.close()
    return native, np.concatenate(parts)


def run_both(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: str
) -> tuple[Logits, Logits]:
    """Logits of the native host, and of OpenVINO with single ops."""
    native, found = run(source, tmp_path / "fused", **config)
    assert native, "this is not fused"
    monkeypatch.setattr(cpu, "fuse_decoder", lambda graph: None)
    native, wanted = run(source, tmp_path / "plain", **config)
    assert not native
    assert np.abs(wanted).max() > 1, "logits that say nothing"
    return found, wanted


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_every_family_gives_what_its_parts_give(
    variant: str, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"recipe": "int8_wo", "activations": "fp32", "kv_cache_dtype": "fp32"}
    found, wanted = run_both(tiny_checkpoint(variant), tmp_path, monkeypatch, **config)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("variant", ["qwen2-window", "gemma3"])
def test_every_cache_gives_what_its_parts_give(
    variant: str, kv_dtype: str, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"recipe": "int4_wo", "activations": "fp32", "kv_cache_dtype": kv_dtype}
    found, wanted = run_both(tiny_checkpoint(variant), tmp_path, monkeypatch, **config)
    error = np.abs(found - wanted).max(axis=1)
    assert error.max() <= TOLERANCE[kv_dtype] and np.median(error) <= TOLERANCE[kv_dtype] / 5


@pytest.mark.parametrize("variant", ["llama-bias", "qwen3", "phi3-partial", "gemma3", "gemma3-untied"])
def test_the_host_computes_the_graph_of_the_model(
    variant: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """As ONNX Runtime does, from the function bodies of our ops."""
    config = {"recipe": "int8_wo", "activations": "fp32", "kv_cache_dtype": "fp32"}
    native, found = run(tiny_checkpoint(variant), tmp_path / "engine", **config)
    assert native
    checkpoint = open_checkpoint(tiny_checkpoint(variant))
    translation = translate(checkpoint, 64)
    spec, kv = translation.spec, translation.spec.kv_layout("fp32", 8)
    graph = run_passes(build_graph(spec, lazy_weights(translation, checkpoint), kv), load("int8_wo"), "fp32")
    (wanted,) = (
        GraphRunner(graph, spec, kv, max_seq_len=64).step({0: checkpoints.prompt_ids(LENGTH)}).values()
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3", "gemma3-untied"])
def test_blocks_of_a_gguf_with_int8_activations(
    variant: str, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last bit before activations are rounded moves some codes by one: most rows differ little, none by much."""
    source = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint(variant), "Q4_1")
    config = {"recipe": "as_is", "activations": "int8", "kv_cache_dtype": "fp32"}
    found, wanted = run_both(source, tmp_path, monkeypatch, **config)
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() <= 0.05 and np.median(error) <= 0.01


def test_a_model_with_a_linear_of_values_stays_on_openvino(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = tmp_path / "mine.toml"
    for excluded in ("layers.1.mlp.down", "lm_head"):
        recipe.write_text(f'weights = "int8"\nsymmetric = true\nexclude = ["{excluded}"]\n')
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            native, _ = run(tiny_checkpoint("llama"), tmp_path / "engine", recipe=str(recipe))
        assert not native
        assert "1 weights are not quantized, so OpenVINO runs the engine, slower" in caplog.text
        assert f"would: {excluded}" in caplog.text


@pytest.mark.parametrize("size", [{"hidden_size": 80, "head_dim": 16}, {"intermediate_size": 100}], ids=str)
def test_inputs_that_are_no_multiple_of_32_stay_on_openvino(size: dict[str, int], tmp_path: Path) -> None:
    source = checkpoints.save("llama", tmp_path / "model", **size)
    native, logits = run(source, tmp_path / "engine", recipe="int8_wo")
    assert not native and np.isfinite(logits).all()


def test_heads_may_have_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20: no multiple of a vector, and norms of heads over it."""
    source = checkpoints.save("qwen3", tmp_path / "model", head_dim=20, num_attention_heads=8)
    config = {"recipe": "int8_wo", "activations": "fp32", "kv_cache_dtype": "fp32"}
    found, wanted = run_both(source, tmp_path, monkeypatch, **config)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


def test_the_lowered_graph_is_left_as_it_was(tiny_checkpoint: Checkpoint) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("gemma3"))
    translation = translate(checkpoint, 64)
    graph = build_graph(
        translation.spec, lazy_weights(translation, checkpoint), translation.spec.kv_layout("int8", 8)
    )
    lowered = cpu.lower(run_passes(graph, load("int8_wo"), "int8"))
    before = ir.to_proto(lowered).SerializeToString(deterministic=True)
    chain = fuse_decoder(lowered)
    assert chain is not None
    assert [n.op_type for n in chain.graph] == ["PackedEmbedding", *["PackedLayer"] * 4, "PackedHead"]
    assert ir.to_proto(lowered).SerializeToString(deterministic=True) == before
