"""How far an engine's logits lie from the reference's: perplexity, KL divergence, agreement.

Fed a few rows at a time, so that memory stays at a few rows of the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # [rows, vocab]


@dataclass(frozen=True)
class Limits:
    """Past one of these an engine is not what its recipe promises, and `verify` exits with 1."""

    mean_kl: float  # nats per token
    top1_agreement: float  # share of positions
    perplexity_ratio: float  # engine / reference


@dataclass(frozen=True)
class Comparison:
    """An engine against the reference over the same tokens; each position predicts the next token.

    mean_kl, max_kl: KL(reference || engine) in nats. top1_agreement: share of positions with the same best
    token. greedy_agreement: of an engine's greedy continuation, the share before the reference would have
    chosen another token; None if none was generated. first_divergent_layer: None where layers were not
    compared or all agree.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    max_kl: float
    max_logit_difference: float
    top1_agreement: float
    greedy_agreement: float | None = None
    first_divergent_layer: int | None = None

    def faults(self, limits: Limits) -> list[str]:
        """What is past the limits, one phrase each. One position with another best token is none: a near tie."""
        ratio = self.perplexity / self.reference_perplexity
        others = round((1 - self.top1_agreement) * self.tokens)
        checks = (
            (self.mean_kl <= limits.mean_kl, f"mean KL {self.mean_kl:.2g} > {limits.mean_kl:g}"),
            (
                self.top1_agreement >= limits.top1_agreement or others <= 1,
                f"top-1 agreement {self.top1_agreement:.4f} < {limits.top1_agreement:g}",
            ),
            (ratio <= limits.perplexity_ratio, f"perplexity ratio {ratio:.3f} > {limits.perplexity_ratio:g}"),
        )
        return [message for good, message in checks if not good]  # NaN is never good


class Comparer:
    """Takes the logits of both sides for the same positions and sums up."""

    def __init__(self) -> None:
        self._nll = self._reference_nll = self._kl = 0.0
        self._max_kl = self._max_difference = 0.0
        self._agreed = self._rows = 0

    def add(self, logits: Logits, reference: Logits, next_ids: NDArray[np.int64]) -> None:
        """logits, reference: FP32 [rows, vocab]; next_ids: the token that follows each position, [rows]."""
        assert logits.shape == reference.shape, (logits.shape, reference.shape)
        assert len(next_ids) == len(logits)
        log_q, log_p = log_softmax(logits), log_softmax(reference)
        rows = np.arange(len(next_ids))
        self._nll -= float(log_q[rows, next_ids].sum())
        self._reference_nll -= float(log_p[rows, next_ids].sum())
        kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)  # [rows]
        self._kl += float(kl.sum())
        difference = np.abs(logits - reference).max(initial=0.0)
        self._max_kl = float(np.maximum(self._max_kl, kl.max(initial=0.0)))  # np.maximum: NaN stays NaN
        self._max_difference = float(np.maximum(self._max_difference, difference))
        self._agreed += int((logits.argmax(axis=-1) == reference.argmax(axis=-1)).sum())
        self._rows += len(rows)

    def result(
        self, greedy_agreement: float | None = None, first_divergent_layer: int | None = None
    ) -> Comparison:
        assert self._rows, "nothing was compared"
        return Comparison(
            tokens=self._rows,
            perplexity=float(np.exp(self._nll / self._rows)),
            reference_perplexity=float(np.exp(self._reference_nll / self._rows)),
            mean_kl=self._kl / self._rows,
            max_kl=self._max_kl,
            max_logit_difference=self._max_difference,
            top1_agreement=self._agreed / self._rows,
            greedy_agreement=greedy_agreement,
            first_divergent_layer=first_divergent_layer,
        )


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """In FP64, so that a KL of 1e-9 is not rounding. [rows, vocab] -> [rows, vocab]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x
