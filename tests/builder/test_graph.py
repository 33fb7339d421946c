"""The graph's contract: names, types and shapes of inputs and outputs, and weights read only when they are saved."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoints import prompt_ids
from graph_runner import GraphRunner
from tree import ROOT

from trtforge.builder import graph as graph_module
from trtforge.builder.checkpoint import Checkpoint, open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights, save_graph
from trtforge.builder.passes.verify import verify
from trtforge.builder.translate import Translation, translate
from trtforge.plugins import DOMAIN
from trtforge.plugins.kv_dtypes import KV_DTYPES

Open = Callable[[str], tuple[Translation, Checkpoint]]


@pytest.fixture
def opened(tiny_checkpoint: Callable[[str], Path]) -> Open:
    def make(variant: str) -> tuple[Translation, Checkpoint]:
        checkpoint = open_checkpoint(tiny_checkpoint(variant))
        return translate(checkpoint, 64), checkpoint

    return make


def graph_of(opened: Open, variant: str, kv_dtype: str = "fp32", tokens_per_block: int = 16) -> ir.Model:
    translation, checkpoint = opened(variant)
    kv = translation.spec.kv_layout(kv_dtype, tokens_per_block)
    return build_graph(translation.spec, lazy_weights(translation, checkpoint), kv)


def shown(values: Any) -> dict[str, str]:
    return {v.name: f"{v.dtype.name} [{', '.join(str(d) for d in v.shape)}]" for v in values}


def test_inputs_and_outputs_of_one_group(opened: Open) -> None:
    graph = graph_of(opened, "llama", "int8").graph
    assert shown(graph.inputs) == {
        "token_ids": "INT32 [T]",
        "positions": "INT32 [T]",
        "cos_sin.0": "FLOAT [T, 16]",
        "query_start": "INT32 [B+1]",
        "kv_lengths": "INT32 [B]",
        "slot_mapping.0": "INT64 [T]",
        "block_tables.0": "INT32 [B, max_blocks.0]",
        "logit_rows": "INT32 [R]",
        "kv_pool.0": "INT8 [num_blocks.0, 2, 2, 2, 16, 16]",
        "kv_scales.0": "FLOAT [num_blocks.0, 2, 2, 2, 16, 1]",
    }
    assert shown(graph.outputs) == {
        "logits": "FLOAT [R, 288]",
        "kv_pool_out.0": "INT8 [num_blocks.0, 2, 2, 2, 16, 16]",
        "kv_scales_out.0": "FLOAT [num_blocks.0, 2, 2, 2, 16, 1]",
    }


def test_layers_of_different_windows_have_their_own_pools_and_rotations(opened: Open) -> None:
    graph = graph_of(opened, "gemma3-untied").graph  # full, sliding, full
    inputs = shown(graph.inputs)
    assert inputs["cos_sin.0"] == inputs["cos_sin.1"] == "FLOAT [T, 16]"
    assert inputs["kv_pool.0"].startswith("FLOAT [num_blocks.0, 2, ")
    assert inputs["kv_pool.1"].startswith("FLOAT [num_blocks.1, 1, ")
    assert set(shown(graph.outputs)) == {"logits", "kv_pool_out.0", "kv_pool_out.1"}
    by_name = {n.name: n for n in graph if n.domain == DOMAIN}
    found = [
        (
            by_name[f"layers.{i}.attention.paged_attention"].attributes["layer"].as_int(),
            by_name[f"layers.{i}.attention.paged_attention"].attributes["window"].as_int(),
            by_name[f"layers.{i}.attention.kv_cache_update"].inputs[3].name,
        )
        for i in range(3)
    ]
    assert found == [(0, 0, "cos_sin.0"), (0, 8, "cos_sin.1"), (1, 0, "cos_sin.0")]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-bias", "phi3-partial", "gemma3"])
def test_onnx_and_our_own_rules_accept_it(variant: str, kv_dtype: str, opened: Open, tmp_path: Path) -> None:
    graph = graph_of(opened, variant, kv_dtype)
    verify(graph, after="the graph was written")
    save_graph(graph, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)


class Counting:
    """A checkpoint that counts its reads."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.reads: Counter[str] = Counter()

    def read(self, name: str) -> Any:
        self.reads[name] += 1
        return self.checkpoint.read(name)


def test_weights_are_read_once_each_when_the_graph_is_saved(opened: Open, tmp_path: Path) -> None:
    translation, checkpoint = opened("llama-tied")
    counting = Counting(checkpoint)
    kv = translation.spec.kv_layout("fp16", 16)
    graph = build_graph(translation.spec, lazy_weights(translation, counting), kv)  # type: ignore[arg-type]
    assert not counting.reads
    written: list[tuple[str, int, int]] = []
    save_graph(graph, tmp_path / "model.onnx", progress=lambda *a: written.append(a))
    big = {n for n, i in checkpoint.tensors.items() if len(i.shape) > 1}
    assert big <= set(counting.reads)
    assert set(counting.reads) == translation.coverage.used
    assert max(counting.reads.values()) == 1
    assert written and {what for what, _, _ in written} == {"weights"}
    assert [done for _, done, _ in written] == list(range(written[-1][2]))


def test_what_is_saved_is_what_the_checkpoint_holds(opened: Open, tmp_path: Path) -> None:
    translation, checkpoint = opened("gemma3")
    save_graph(graph_of(opened, "gemma3"), tmp_path / "model.onnx")
    saved = ir.load(tmp_path / "model.onnx").graph.initializers
    for name, source in translation.sources.items():
        offset = 1.0 if name.endswith("norm.weight") else 0.0  # Gemma's norms multiply by (1 + weight)
        tensor = saved[name].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), source.read(checkpoint) + np.float32(offset))
    assert "lm_head.weight" not in saved


def test_logits_are_those_of_the_rows_asked_for(opened: Open) -> None:
    translation, checkpoint = opened("llama")
    spec = translation.spec
    kv = spec.kv_layout("fp32", 8)
    graph = build_graph(spec, lazy_weights(translation, checkpoint), kv)
    every, some = (GraphRunner(graph, spec, kv, max_seq_len=32) for _ in range(2))
    chunks = {0: prompt_ids(8), 1: prompt_ids(5, seed=1)}
    expected = every.run(chunks, range(13))
    np.testing.assert_allclose(some.run(chunks, [12, 7]), expected[[12, 7]], atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "fp8"])
def test_a_smaller_cache_gives_nearly_the_same_logits(kv_dtype: str, opened: Open) -> None:
    translation, checkpoint = opened("gemma3")
    spec, prompt = translation.spec, prompt_ids(30)

    def logits(dtype: str) -> np.ndarray:
        kv = spec.kv_layout(dtype, 8)
        graph = build_graph(spec, lazy_weights(translation, checkpoint), kv)
        runner = GraphRunner(graph, spec, kv, max_seq_len=32)
        return np.concatenate([runner.step({0: prompt[:17]})[0], runner.step({0: prompt[17:]})[0]])

    exact, rounded = logits("fp32"), logits(kv_dtype)
    error = np.abs(exact - rounded).mean() / np.abs(exact).mean()
    assert 0 < error < {"fp16": 1e-3, "int8": 3e-2, "fp8": 1.5e-1}[kv_dtype]


def test_the_docs_have_the_contracts_table() -> None:
    rows = [line for line in (graph_module.__doc__ or "").splitlines() if line.startswith("|")]
    assert len(rows) == 12
    text = (ROOT / "docs" / "graph.md").read_text()
    assert "\n".join(rows) in text


def test_the_table_has_every_input(opened: Open) -> None:
    names = re.findall(r"^\| ([a-z_.{}]+) \|", graph_module.__doc__ or "", re.MULTILINE)
    inputs = graph_of(opened, "gemma3", "fp8").graph.inputs
    assert {re.sub(r"\d+$", "", v.name or "") for v in inputs} == {
        re.sub(r"\{.\}$", "", n) for n in names
    } - {"input"}
