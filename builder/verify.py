"""verify: an engine against its checkpoint run by the plain reference, on the same tokens.

The text is cut into windows; all positions of each go through both sides. Then the engine continues the first one
greedily, and the reference reads that continuation: up to the first token that it would not have chosen itself,
both would have written the same.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trtforge.builder import reference
from trtforge.builder.checkpoint.base import Checkpoint
from trtforge.builder.compare import Comparer, Comparison, Limits, Logits
from trtforge.builder.spec import ModelSpec
from trtforge.builder.targets import Progress
from trtforge.builder.translate import Translation, translate
from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.manifest import Manifest

#: A text in several languages, with code and numbers: what is compared when the user gives none.
DEFAULT_TEXT = Path(__file__).parent / "verify_text.txt"

GREEDY_PROMPT, GREEDY_TOKENS = 64, 32

#: By the weights' bits, and by the cache's: an engine must be within the wider of the two. From measurements on a
#: model of 135 M parameters, which suffers more from quantization than a large one, with a margin of about three.
WEIGHT_LIMITS = {
    "full_prec": Limits(mean_kl=1e-4, top1_agreement=0.99, perplexity_ratio=1.01),
    "int8_wo": Limits(mean_kl=0.02, top1_agreement=0.93, perplexity_ratio=1.05),
}
OTHER_WEIGHTS = Limits(mean_kl=0.5, top1_agreement=0.7, perplexity_ratio=1.5)
KV_LIMITS = {
    "int8": Limits(mean_kl=0.01, top1_agreement=0.95, perplexity_ratio=1.03),
    "fp8": Limits(mean_kl=0.05, top1_agreement=0.9, perplexity_ratio=1.1),
}


class Engine(Protocol):
    """What is asked of the engine under test; trtforge.runtime.score has it."""

    manifest: Manifest

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Of every position, in pieces; a piece is valid until the next."""

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that the engine likes best after these."""


def limits(manifest: Manifest) -> Limits:
    """What the engine's recipe and cache dtype promise."""
    weights = WEIGHT_LIMITS.get(manifest.recipe, OTHER_WEIGHTS)
    kv = KV_LIMITS.get(manifest.kv.dtype, weights)
    return Limits(
        mean_kl=max(weights.mean_kl, kv.mean_kl),
        top1_agreement=min(weights.top1_agreement, kv.top1_agreement),
        perplexity_ratio=max(weights.perplexity_ratio, kv.perplexity_ratio),
    )


def verify(
    engine: Engine,
    checkpoint: Checkpoint,
    token_ids: Sequence[int],
    progress: Progress,
    window: int = 512,
) -> Comparison:
    """Compare over `token_ids`, in windows of `window` tokens.

    Raises InvalidArgument if the checkpoint is of another model, or if there are too few tokens.
    """
    translation = translate(checkpoint, engine.manifest.limits.max_seq_len)
    check_same_model(engine.manifest, translation.spec)
    windows = cut(token_ids, min(window, engine.manifest.limits.max_seq_len))
    prompt = windows[0][: min(GREEDY_PROMPT, engine.manifest.limits.max_seq_len // 2)]
    continuation = engine.greedy(prompt, min(GREEDY_TOKENS, engine.manifest.limits.max_seq_len - len(prompt)))

    read = reader(translation, checkpoint, progress)
    states = reference.hidden_states(translation.spec, read, [*windows, [*prompt, *continuation]])
    head = reference.output_head(translation.spec, read)
    comparer = Comparer()
    for number, (ids, hidden) in enumerate(zip(windows, states, strict=False)):
        progress("compare", number, len(windows))
        start = 0
        for logits in engine.logits(ids):
            stop = min(start + len(logits), len(ids) - 1)  # the last position predicts nothing that we know
            next_ids = np.asarray(ids[start + 1 : stop + 1])
            comparer.add(logits[: stop - start], head(hidden[start:stop]), next_ids)
            start = stop
    chosen = head(states[-1][len(prompt) - 1 : -1]).argmax(axis=-1)
    return comparer.result(greedy_agreement=common_prefix(continuation, chosen.tolist()) / len(continuation))


def check_same_model(manifest: Manifest, spec: ModelSpec) -> None:
    for key in ("architecture", "vocab_size", "hidden_size", "num_layers", "num_heads"):
        engine, checkpoint = manifest.model.get(key), getattr(spec, key)
        if engine != checkpoint:
            raise InvalidArgument(
                f"the engine was built from {manifest.model.get('source')}, whose {key} is {engine}; "
                f"the reference's is {checkpoint}: give the checkpoint of the same model"
            )


def cut(token_ids: Sequence[int], window: int) -> list[list[int]]:
    """Windows of the same length, but for the last; one of a single token predicts nothing and is left out."""
    windows = [list(token_ids[i : i + window]) for i in range(0, len(token_ids), window)]
    windows = [w for w in windows if len(w) > 1]
    if not windows:
        raise InvalidArgument(f"the text has {len(token_ids)} tokens; give a longer one")
    return windows


def reader(translation: Translation, checkpoint: Checkpoint, progress: Progress) -> reference.Read:
    total = len(translation.sources)
    done = iter(range(total + 1))

    def read(name: str) -> reference.Array:
        progress("reference", min(next(done, total), total), total)
        return translation.sources[name].read(checkpoint)

    return read


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
