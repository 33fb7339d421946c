"""The plain numpy reference of `verify` against transformers, for every variant of the tiny checkpoints."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import numpy as np
import pytest

from trtforge.builder import reference
from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.translate import translate


def numpy_logits(directory: Path, sequences: list[list[int]], max_seq_len: int) -> list[np.ndarray]:
    checkpoint = open_checkpoint(directory)
    try:
        translation = translate(checkpoint, max_seq_len)

        def read(name: str) -> np.ndarray:
            return translation.sources[name].read(checkpoint)

        states = reference.hidden_states(translation.spec, read, sequences)
        return [reference.output_head(translation.spec, read)(x) for x in states]
    finally:
        checkpoint.close()


@pytest.mark.parametrize("variant", checkpoints.VARIANTS)
def test_logits_are_those_of_transformers(tiny_checkpoint: Callable[[str], Path], variant: str) -> None:
    import torch

    directory = tiny_checkpoint(variant)
    length = checkpoints.VARIANTS[variant].length
    # The longest sequence decides about the rules that depend on the length, as it does in transformers.
    sequences = [checkpoints.prompt_ids(length, seed=seed) for seed in range(2)]
    model = checkpoints.reference(directory)
    with torch.no_grad():
        expected = model(torch.tensor(sequences)).logits.numpy()
    got = numpy_logits(directory, sequences, max_seq_len=length)
    assert expected.std() > 0.2  # a thousand tolerances: else they would say little
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
