"""The sampler: logits to tokens, by each request's own parameters.

The order is Hugging Face's: logit bias, penalties, bad words and end tokens, then temperature, top-k, top-p,
min-p. Randomness is counter-based, keyed by (seed, position): a seed gives the same text whatever else is in
the batch, and after a preemption too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import EngineFailure, InvalidArgument
from trtforge.runtime.request import Request, Sampled, SamplingParams, Step, TokenLogprobs

Scores = NDArray[np.float32]  # [vocab]

#: Below this temperature the best token is certain to FP32 anyway; clients send 1e-6 for greedy.
GREEDY_TEMPERATURE = 1e-5
#: How many of the best tokens top-p looks at first; only a flat distribution needs more.
NUCLEUS_FIRST = 512


class Sampler:
    """Has no state: what it needs of a request's past is in the request."""

    def sample(self, logits: NDArray[np.float32], step: Step) -> list[Sampled | None]:
        """logits [R, vocab]: one for each row that wants one. The result is in the order of `step.rows`, None
        where no logits were wanted. A row of logits that is not finite fails its own request, no other.
        """
        wanting = [i for i, row in enumerate(step.rows) if row.num_logits]
        assert len(wanting) == len(logits), "one row of logits for each row that wants one"
        result: list[Sampled | None] = [None] * len(step.rows)
        best = logits.argmax(axis=1) if len(wanting) else ()
        for scores, top, i in zip(logits, best, wanting, strict=True):
            request = step.rows[i].request
            if not np.isfinite(scores[top]):  # NaN counts as the largest for argmax
                result[i] = Sampled(
                    error=EngineFailure(f"the logits are not finite at token {request.num_tokens}")
                )
                continue
            try:
                token = int(top) if _is_plain(request) else choose(scores, request)
            except InvalidArgument as e:
                result[i] = Sampled(error=e)
                continue
            wanted = request.params.logprobs
            result[i] = Sampled(token, None if wanted is None else log_probabilities(scores, token, wanted))
        return result


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_TEMPERATURE or params.top_k == 1


def _is_plain(request: Request) -> bool:
    """Whether the request takes the best of the raw logits."""
    p = request.params
    return (
        _is_greedy(p)
        and p.repetition_penalty == 1.0
        and not (p.presence_penalty or p.frequency_penalty or p.logit_bias or p.bad_words)
        and len(request.output_ids) >= p.min_tokens
    )


def choose(logits: Scores, request: Request) -> int:
    """The token of one request from its raw logits [vocab].

    Raises InvalidArgument if the request's own parameters leave no token.
    """
    scores = process(logits, request)
    if not np.isfinite(scores.max()):
        raise InvalidArgument(
            f"no token is left at position {request.num_tokens}: bad_words and logit_bias ban all"
        )
    if _is_greedy(request.params):
        return int(scores.argmax())
    kept = candidates(scores, request.params)
    return kept.draw(uniform(request.seed, request.num_tokens))


# -- what a request's past does to its scores
# ----------------------------------------------------------------------


def process(logits: Scores, request: Request) -> Scores:
    """Bias, penalties, bad words and min_tokens, in this order, on a copy."""
    params, scores = request.params, logits.copy()
    if params.logit_bias:
        scores[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    _penalize(scores, request)
    for word in params.bad_words:
        if len(word) == 1 or ends_with(request, word[:-1]):
            scores[word[-1]] = -np.inf
    if len(request.output_ids) < params.min_tokens:
        scores[list(request.end_ids)] = -np.inf
    return scores


def _penalize(scores: Scores, request: Request) -> None:
    """Repetition (Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over the
    output.
    """
    p = request.params
    if p.repetition_penalty != 1.0:
        seen = np.unique(request.prompt_ids + request.output_ids)
        some = scores[seen]
        scores[seen] = np.where(some < 0, some * p.repetition_penalty, some / p.repetition_penalty)
    if request.output_ids and (p.presence_penalty or p.frequency_penalty):
        said, times = np.unique(request.output_ids, return_counts=True)
        scores[said] -= (p.presence_penalty + p.frequency_penalty * times).astype(np.float32)


def ends_with(request: Request, tokens: tuple[int, ...]) -> bool:
    """Whether prompt and output together end with these tokens."""
    end = request.num_tokens
    return len(tokens) <= end and tuple(request.tokens(end - len(tokens), end)) == tokens


# -- the cuts, and the draw
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The tokens that are left, in ascending order, and their weights: FP64, positive, not normalized."""

    tokens: NDArray[np.intp]
    weights: NDArray[np.float64]

    def keep(self, mask: NDArray[np.bool_]) -> "Candidates":
        return Candidates(self.tokens[mask], self.weights[mask])

    def draw(self, u: float) -> int:
        """The token at the share u, in [0, 1), of the cumulative weight."""
        cumulative = self.weights.cumsum()
        i = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
        return int(self.tokens[min(i, len(self.tokens) - 1)])


def candidates(scores: Scores, params: SamplingParams) -> Candidates:
    """Temperature, top-k, top-p and min-p, in this order, on scores [vocab] of which at least one is
    finite.
    """
    threshold = -np.inf
    if 0 < params.top_k < len(scores):
        threshold = np.partition(scores, -params.top_k)[-params.top_k]  # ties with the last one stay
    tokens = np.flatnonzero((scores >= threshold) & (scores > -np.inf))
    scaled = scores[tokens].astype(np.float64) / params.temperature
    left = Candidates(tokens, np.exp(scaled - scaled.max()))
    if params.top_p < 1.0:
        left = _nucleus(left, params.top_p)
    if params.min_p > 0.0:
        left = left.keep(left.weights >= params.min_p * left.weights.max())
    return left


def _nucleus(left: Candidates, top_p: float) -> Candidates:
    """The smallest set of the best tokens whose probabilities reach top_p (Holtzman et al. 2020); at least
    one.

    Sorting a whole vocabulary costs milliseconds, so the best few are looked at first, then eight times as
    many.
    """
    enough = top_p * left.weights.sum()
    n, count = len(left.tokens), NUCLEUS_FIRST
    while True:
        best = np.arange(n) if count >= n else np.argpartition(left.weights, n - count)[n - count :]
        best = best[np.argsort(-left.weights[best], kind="stable")]
        cumulative = left.weights[best].cumsum()
        if count >= n or cumulative[-1] >= enough:
            kept = best[: int(np.searchsorted(cumulative, enough, side="left")) + 1]
            return Candidates(left.tokens[np.sort(kept)], left.weights[np.sort(kept)])
        count *= 8


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the counter-based generator Philox4x64 (Salmon et al. 2011)."""
    key = np.array([seed % 2**64, 0], np.uint64)  # a list with a large seed would be rounded to FP64
    raw = int(np.random.Philox(key=key, counter=[position, 0, 0, 0]).random_raw())
    return (raw >> 11) * 2.0**-53


def log_probabilities(logits: Scores, token: int, top: int) -> TokenLogprobs:
    """Of the raw logits [vocab]: the chosen token's, and the `top` best with theirs, best first."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    if not top:
        return TokenLogprobs(float(x[token]))
    top = min(top, len(x))
    best = np.argpartition(x, len(x) - top)[len(x) - top :]
    best = best[np.lexsort((best, -x[best]))]
    return TokenLogprobs(float(x[token]), tuple((int(t), float(x[t])) for t in best))
