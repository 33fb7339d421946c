"""verify, end to end: a good engine is within its limits, a spoilt one is not, whatever was spoilt."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from click.testing import CliRunner

from trtforge.builder import verify
from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.cli import main
from trtforge.builder.compare import Comparison
from trtforge.plugins.errors import InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.score import Scorer

TOKENS = checkpoints.prompt_ids(100)


class Spoilt(Scorer):
    """An engine whose logits are changed before anybody sees them."""

    def __init__(self, engine: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(engine)
        self._change = change

    def logits(self, token_ids: Sequence[int], rows_at_once: int = 128) -> Iterator[np.ndarray]:
        for piece in super().logits(token_ids, rows_at_once):
            yield self._change(piece)


def compare(scorer: Scorer, reference: Path, window: int = 512) -> Comparison:
    checkpoint = open_checkpoint(reference)
    try:
        return verify.verify(scorer, checkpoint, TOKENS, lambda *_: None, window)
    finally:
        checkpoint.close()
        scorer.close()


def test_a_full_precision_engine_agrees(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path]
) -> None:
    engine = tiny_engine("qwen3", kv_cache_dtype="fp32", max_seq_len=64, max_num_tokens=24)
    scorer = Scorer(engine)
    result = compare(scorer, tiny_checkpoint("qwen3"))
    assert result.tokens == len(TOKENS) - 2  # two windows, the last token of each predicts nothing known
    assert result.mean_kl < 1e-8
    assert result.max_logit_difference < 2e-4
    assert (result.top1_agreement, result.greedy_agreement) == (1, 1)
    assert not result.faults(verify.limits(scorer.manifest))


def test_a_quantized_cache_is_seen(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path]
) -> None:
    exact, rounded = (
        compare(
            Scorer(tiny_engine("llama", kv_cache_dtype=d, max_seq_len=64)), tiny_checkpoint("llama")
        ).mean_kl
        for d in ("fp32", "int8")
    )
    assert exact * 100 < rounded < 0.1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.roll(x, 1, axis=1),
        lambda x: x * 3,
        lambda x: np.zeros_like(x),
        lambda x: x * np.float32(np.nan),
    ],
    ids=["other tokens", "too sharp", "nothing", "nan"],
)
def test_a_spoilt_engine_is_past_its_limits(
    tiny_checkpoint: Callable[[str], Path],
    tiny_engine: Callable[..., Path],
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    scorer = Spoilt(tiny_engine("llama", max_seq_len=64), change)
    assert compare(scorer, tiny_checkpoint("llama")).faults(verify.limits(scorer.manifest))


def changed(checkpoint: Path, tensor: str, directory: Path) -> Path:
    """A copy of a checkpoint in which one tensor is another."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(checkpoint, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[tensor] = tensors[tensor][::-1].copy()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("module", "layer"),
    [("1.self_attn.k_proj", 1), ("2.self_attn.v_proj", 2), ("0.mlp.down_proj", 1), ("3.mlp.up_proj", None)],
)
def test_the_first_layer_that_diverges_is_named(
    tiny_checkpoint: Callable[[str], Path],
    tiny_engine: Callable[..., Path],
    tmp_path: Path,
    module: str,
    layer: int | None,
) -> None:
    """What a layer's MLP does wrong is seen in the next layer's K and V; the last one's only in the logits."""
    other = changed(tiny_checkpoint("gemma3"), f"model.layers.{module}.weight", tmp_path / "other")
    for dtype in ("fp32", "int8"):
        result = compare(Scorer(tiny_engine("gemma3", kv_cache_dtype=dtype, max_seq_len=64)), other)
        assert result.first_divergent_layer == layer
        assert result.mean_kl > 0.01


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_no_layer_of_a_good_engine_diverges(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path], dtype: str
) -> None:
    scorer = Scorer(tiny_engine("gemma3", kv_cache_dtype=dtype, max_seq_len=64))
    assert compare(scorer, tiny_checkpoint("gemma3")).first_divergent_layer is None


def test_greedy_agreement_is_the_common_beginning() -> None:
    assert verify.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert verify.common_prefix([1, 2], [1, 2]) == 2
    assert verify.common_prefix([1], [2]) == 0


def test_the_checkpoint_of_another_model_is_refused(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidArgument, match="architecture is LlamaForCausalLM"):
        compare(Scorer(tiny_engine("llama", max_seq_len=64)), tiny_checkpoint("qwen3"))


def test_the_command_prints_json_and_exits_by_the_limits(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    engine = str(tiny_engine("llama", max_seq_len=64))
    good = CliRunner().invoke(
        main, ["verify", engine, "--reference", str(tiny_checkpoint("llama")), "--json"]
    )
    assert good.exit_code == 0, good.stderr
    answer = json.loads(good.stdout)
    assert {
        "perplexity",
        "reference_perplexity",
        "mean_kl",
        "top1_agreement",
        "first_divergent_layer",
    } <= set(answer)
    assert answer["perplexity"] == pytest.approx(answer["reference_perplexity"], rel=1e-3)

    other = checkpoints.save("llama", tmp_path / "other", seed=1)
    bad = CliRunner().invoke(main, ["verify", engine, "--reference", str(other), "--tokens", "50"])
    assert bad.exit_code == 1
    assert "past the limits: mean KL" in bad.stdout


def test_a_text_of_ones_own(
    tiny_checkpoint: Callable[[str], Path], tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Ein kurzer Satz.")
    args = ["verify", str(tiny_engine("llama", max_seq_len=64)), "--reference", str(tiny_checkpoint("llama"))]
    result = CliRunner().invoke(main, [*args, "--text", str(text), "--json"])
    assert (
        json.loads(result.stdout)["tokens"] == 13
    )  # 16 characters, two merges, and the last predicts nothing
    text.write_text("x")
    refused = CliRunner().invoke(main, [*args, "--text", str(text)])
    assert refused.exit_code == 1
    assert "1 tokens" in refused.stderr
