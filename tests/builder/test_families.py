"""Every family and variation against transformers: the graph, run by its function bodies, gives the same logits.

A step holds two requests at different stages, prompts come in chunks of 5 tokens and the rest is decoded
greedily, past the window and past the original context where the variation has one. The reference is one forward
pass in fp32 over the whole sequence, whose length is the engine's max_seq_len.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, prompt_ids, reference
from graph_runner import GraphRunner

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights
from trtforge.builder.translate import translate

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
    spec = translation.spec
    assert translation.coverage.unused == () and translation.warnings == ()
    kv = spec.kv_layout("fp32", tokens_per_block=8)
    graph = build_graph(spec, lazy_weights(translation, checkpoint), kv)
    runner = GraphRunner(graph, spec, kv, max_seq_len=length)
    prompts = [prompt_ids(length - NEW_TOKENS, seed=seed) for seed in (1, 2)]

    tokens, logits = runner.generate(prompts, NEW_TOKENS, chunk=5)

    model = reference(directory)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    for row, ours, theirs in zip(tokens, logits, expected, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
        start = length - NEW_TOKENS
        assert row[start:] == theirs[start - 1 : -1].argmax(-1).tolist()
        assert len(set(row[start:])) > 1, "a text of one token shows nothing"
