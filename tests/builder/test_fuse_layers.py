"""PackedLayer: a fused engine gives what the ops that it is made of give, for every family and kind of cache."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import numpy as np
import onnx_ir as ir
import pytest
from stepping import Logits, Stepper

from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.builder.targets import cpu
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.executors import open_executor
from trtforge.runtime.manifest import Limits

#: Whose layers hold norms of heads, norms after blocks or biases in the MLP: they stay as they are.
UNFUSED = ("llama-bias", "qwen3", "qwen3-bias", "gemma3", "gemma3-untied")


def run(source: Path, output: Path, **config: str) -> tuple[int, Logits]:
    """(layers that are one op, logits of a prompt in three chunks)"""
    manifest = build(source, output, BuildConfig(limits=Limits(max_seq_len=64), tokens_per_block=8, **config))
    executor = open_executor(output, threads=2)
    steps, prompt = Stepper(executor, 16), checkpoints.prompt_ids(40)
    first, rest, last = steps.new(), prompt[:33], prompt[33:]
    parts = [steps.step([(first, part, len(part))])[0] for part in (rest[:9], rest[9:], last)]
    executor.close()
    text = (output / "model.xml").read_text()
    assert manifest.model["num_layers"] > 0
    return text.count('type="PackedLayer"'), np.concatenate(parts)


def compare(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: str) -> int:
    """Holds the two equal; gives the number of fused layers."""
    fused, found = run(source, tmp_path / "fused", recipe="int8_wo", **config)
    monkeypatch.setattr(cpu, "fuse_layers", lambda graph: graph)
    plain, wanted = run(source, tmp_path / "plain", recipe="int8_wo", **config)
    assert plain == 0
    assert np.abs(wanted).max() > 1, "logits that say nothing"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)
    return fused


@pytest.mark.parametrize("variant", [v for v in checkpoints.VARIANTS if not v.startswith("llama-l")])
def test_fused_layers_give_what_their_parts_give(
    variant: str,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tiny_checkpoint(variant)
    fused = compare(source, tmp_path, monkeypatch, activations="fp32", kv_cache_dtype="fp32")
    assert (fused > 0) == (variant not in UNFUSED)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_fused_layers_take_every_cache(
    kv_dtype: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint("qwen2-window")
    # what rounds to another code of a small cache moves the logits
    fused, found = run(
        source, tmp_path / "fused", recipe="int8_wo", activations="fp32", kv_cache_dtype=kv_dtype
    )
    monkeypatch.setattr(cpu, "fuse_layers", lambda graph: graph)
    _, wanted = run(source, tmp_path / "plain", recipe="int8_wo", activations="fp32", kv_cache_dtype=kv_dtype)
    assert fused == 4
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 if kv_dtype == "fp32" else 0.1)


def test_a_layer_with_a_linear_of_values_stays(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('weights = "int8"\nsymmetric = true\nexclude = ["layers.1.mlp.down"]\n')
    fused, _ = run(tiny_checkpoint("llama"), tmp_path / "engine", recipe=str(recipe))
    assert fused == 1


def test_the_lowered_graph_is_left_as_it_was(tiny_checkpoint: Callable[[str], Path]) -> None:
    from trtforge.builder.checkpoint import open_checkpoint
    from trtforge.builder.graph import build_graph, lazy_weights
    from trtforge.builder.passes import run_passes
    from trtforge.builder.recipes import load
    from trtforge.builder.translate import translate

    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    translation = translate(checkpoint, 64)
    graph = build_graph(
        translation.spec, lazy_weights(translation, checkpoint), translation.spec.kv_layout("int8", 8)
    )
    quantized = run_passes(graph, load("int8_wo"), "int8")
    before = ir.to_proto(quantized).SerializeToString(deterministic=True)
    lowered = cpu.lower(quantized)
    assert [n.op_type for n in lowered.graph].count("PackedLayer") == 2
    assert ir.to_proto(quantized).SerializeToString(deterministic=True) == before
