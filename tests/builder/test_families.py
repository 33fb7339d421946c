"""Every family and variation against transformers: the graph, run by its function bodies, gives the same logits.

A step holds two requests at different stages, prompts come in chunks of 5 tokens and the rest is decoded
greedily, past the window and past the original context where the variation has one. The reference is one forward
pass in fp32 over the whole sequence, whose length is the engine's max_seq_len.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, prompt_ids, reference
from graph_runner import GraphRunner

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights
from trtforge.builder.spec import ModelSpec
from trtforge.builder.translate import Translation, translate
from trtforge.runtime.manifest import Rope

NEW_TOKENS = 8
TOLERANCE = 2e-4

#: Variation and length of the sequence; scaled RoPEs within their original context too.
CASES = [(name, variant.length) for name, variant in VARIANTS.items()]
CASES += [("llama-dynamic", 14), ("llama-longrope", 14), ("phi3-longrope", 14)]


@pytest.mark.parametrize(("name", "length"), CASES, ids=lambda v: str(v))
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, length: int, tiny_checkpoint: Callable[[str], Path]
) -> None:
    directory = tiny_checkpoint(name)
    checkpoint = open_checkpoint(directory)
    translation = translate(checkpoint, max_seq_len=length)
    assert translation.coverage.unused == () and translation.warnings == ()
    prompts = [prompt_ids(length - NEW_TOKENS, seed=seed) for seed in (1, 2)]

    tokens, logits = _runner(translation, checkpoint, length).generate(prompts, NEW_TOKENS, chunk=5)

    model = reference(directory)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    for row, ours, theirs in zip(tokens, logits, expected, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
        start = length - NEW_TOKENS
        assert row[start:] == theirs[start - 1 : -1].argmax(-1).tolist()
        assert len(set(row[start:])) > 1, "a text of one token shows nothing"


def _faster(rope: Rope) -> Rope:
    return replace(rope, inv_freq=tuple(f * 1.01 for f in rope.inv_freq))


#: One detail of a model made wrong by a little: variation, and what to do to its spec.
WRONG: dict[str, tuple[str, Callable[[ModelSpec], ModelSpec]]] = {
    "rotation": ("llama", lambda s: replace(s, ropes=(_faster(s.ropes[0]),))),
    "rotation of a kind": ("gemma3", lambda s: replace(s, ropes=(s.ropes[0], _faster(s.ropes[1])))),
    "attention factor": (
        "llama-yarn",
        lambda s: replace(s, ropes=(replace(s.ropes[0], attention_factor=1.0),)),
    ),
    "part rotated": (
        "phi3-partial",
        lambda s: replace(s, ropes=(replace(s.ropes[0], inv_freq=s.ropes[0].inv_freq[:-1]),)),
    ),
    "scale": ("gemma3", lambda s: replace(s, attention_scale=s.head_size**-0.5)),
    "window": ("mistral-window", lambda s: replace(s, layers=tuple(replace(x, window=9) for x in s.layers))),
    "windows the other way round": ("qwen2-window", lambda s: replace(s, layers=s.layers[::-1])),
    "norm's epsilon": ("llama", lambda s: replace(s, norm_epsilon=1e-2)),
    "norm's offset": ("gemma3", lambda s: replace(s, norm_offset=0.0)),
    "norms of Q and K": ("qwen3", lambda s: replace(s, qk_norm=False)),
    "norms after the blocks": ("gemma3", lambda s: replace(s, sandwich_norms=False)),
    "biases of Q, K and V": ("qwen2", lambda s: replace(s, qkv_bias=False)),
    "bias of O": ("llama-bias", lambda s: replace(s, output_bias=False)),
    "biases of the MLP": ("llama-bias", lambda s: replace(s, mlp_bias=False)),
    "embedding's scale": ("gemma3", lambda s: replace(s, embedding_scale=8.1)),
    "activation": ("gemma3", lambda s: replace(s, activation="silu")),
    "cap of the logits": ("gemma3-untied", lambda s: replace(s, logit_softcap=None)),
}


@pytest.mark.parametrize("detail", WRONG)
def test_a_wrong_detail_shows(detail: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    """What the comparison above would see: each of these moves the logits well beyond the tolerance."""
    variant, spoil = WRONG[detail]
    checkpoint = open_checkpoint(tiny_checkpoint(variant))
    translation = translate(checkpoint, VARIANTS[variant].length)
    prompt = prompt_ids(VARIANTS[variant].length)
    right, wrong = (
        _runner(t, checkpoint, len(prompt)).step({0: prompt})[0]
        for t in (translation, replace(translation, spec=spoil(translation.spec)))
    )
    assert np.abs(right - wrong).max() > 20 * TOLERANCE


def _runner(translation: Translation, checkpoint: Any, max_seq_len: int) -> GraphRunner:
    spec = translation.spec
    kv = spec.kv_layout("fp32", tokens_per_block=8)
    graph = build_graph(spec, lazy_weights(translation, checkpoint), kv)
    return GraphRunner(graph, spec, kv, max_seq_len=max_seq_len)
