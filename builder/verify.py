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

#: By the weights' recipe, and by the cache's dtype: an engine must be within the wider of the two. Measured on a
#: model of 135 M parameters, which suffers more from quantization than a large one, with a margin of about three.
WEIGHT_LIMITS = {
    "full_prec": Limits(mean_kl=1e-4, top1_agreement=0.99, perplexity_ratio=1.01),
    "as_is": Limits(mean_kl=0.015, top1_agreement=0.9, perplexity_ratio=1.02),
    "int8_wo": Limits(mean_kl=0.02, top1_agreement=0.9, perplexity_ratio=1.05),
}
OTHER_WEIGHTS = Limits(mean_kl=1.0, top1_agreement=0.5, perplexity_ratio=2.0)
KV_LIMITS = {
    "int8": Limits(mean_kl=0.005, top1_agreement=0.96, perplexity_ratio=1.02),
    "fp8": Limits(mean_kl=0.03, top1_agreement=0.85, perplexity_ratio=1.05),
}

#: Relative error of K and V past which a layer has diverged; measured on the same model, margins of three to ten.
WEIGHT_TOLERANCE = {"full_prec": 1e-4, "as_is": 0.2, "int8_wo": 0.2}
OTHER_TOLERANCE = 0.9
KV_TOLERANCE = {"fp32": 1e-4, "fp16": 0.005, "bf16": 0.03, "int8": 0.1, "fp8": 0.3}


class Engine(Protocol):
    """What is asked of the engine under test; trtforge.runtime.score has it."""

    manifest: Manifest

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Of every position, in pieces; a piece is valid until the next."""

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that the engine likes best after these."""

    def cached(self, layer: int, tokens: int) -> tuple[reference.Array, reference.Array] | None:
        """K (rotated) and V of a layer from the cache, FP32 [tokens, kv_heads, head_size], of the sequence that
        ran last; None if they cannot be had."""


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

    for _ in engine.logits(windows[0]):
        pass  # fills the cache, which the layers are compared by
    layers = LayerComparer(engine, len(windows[0]))
    read = reader(translation, checkpoint, progress)
    states = reference.hidden_states(
        translation.spec, read, [*windows, [*prompt, *continuation]], layers.observe
    )
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
    agreement = common_prefix(continuation, chosen.tolist()) / len(continuation)
    return comparer.result(agreement, layers.first_divergent)


class LayerComparer:
    """Holds the K and V that an engine left in its cache against the reference's, layer by layer.

    They are all that later layers and tokens see of a layer's input, so the first layer whose K or V are off is
    where to look: at its norm and projections, or at what came out of the layer before. Off means: the error's
    norm over the reference's, K and V each, is above the tolerance of recipe and cache dtype.
    """

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens
        self._tolerance = max(
            WEIGHT_TOLERANCE.get(engine.manifest.recipe, OTHER_TOLERANCE),
            KV_TOLERANCE[engine.manifest.kv.dtype],
        )
        self.first_divergent: int | None = None

    def observe(self, layer: int, *reference_kv: reference.Array) -> None:
        cached = self._engine.cached(layer, self._tokens)
        if cached is None or self.first_divergent is not None:
            return
        errors = [
            np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(cached, reference_kv, strict=True)
        ]
        if not max(errors) <= self._tolerance:  # NaN is never good
            self.first_divergent = layer


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
