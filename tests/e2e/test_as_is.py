"""The real model with its file's own blocks: what int8 activations cost, on real text."""

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from numpy.typing import NDArray

from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.runtime.score import Scorer
from trtforge.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TOKENS, WINDOW = 8192, 512
TEXTS = (
    "assignment",
    "booleans",
    "class",
    "exceptions",
    "execmodel",
    "import",
    "objects",
    "typesseq",
    "with",
)


def run(engine: Path, windows: list[list[int]]) -> tuple[float, NDArray[np.int64]]:
    """(perplexity, best token of every position)"""
    scorer = Scorer(engine)
    losses, best = [], []
    for window in windows:
        logits = np.concatenate([piece.copy() for piece in scorer.logits(window)])[:-1]
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        losses.append(total - logits[np.arange(len(logits)), window[1:]])
        best.append(logits.argmax(-1))
    scorer.close()
    return float(np.exp(np.concatenate(losses).mean())), np.concatenate(best)


def test_int8_activations_cost_little(real_gguf: Path, tmp_path: Path) -> None:
    for activations in ("fp32", "int8"):
        config = BuildConfig(recipe="as_is", activations=activations, kv_cache_dtype="fp32")
        build(real_gguf, tmp_path / activations, config)
    ids = Tokenizer.load(tmp_path / "int8").encode("\n".join(topics[name] for name in TEXTS))[:TOKENS]
    assert len(ids) == TOKENS
    windows = [ids[i : i + WINDOW] for i in range(0, TOKENS, WINDOW)]
    exact, wanted = run(tmp_path / "fp32", windows)
    rounded, found = run(tmp_path / "int8", windows)
    assert exact < 25, "text that the model does not understand"
    assert 0 < abs(rounded / exact - 1) < 0.005
    assert (found == wanted).mean() >= 0.96
