"""The sampler: logits to tokens, by each request's own parameters.

The order is Hugging Face's: logit bias, penalties, bad words and end tokens, then temperature, top-k, top-p,
min-p. Randomness is counter-based, keyed by (seed, position): a seed gives the same text whatever else is in
the batch, and after a preemption too.

Nothing sorts or partitions the vocabulary: what is looked for among the best is looked for among the few that
reach a bound, and the bound comes from the best of each of some hundred groups.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import EngineFailure, InvalidArgument
from trtforge.runtime.request import Request, Sampled, SamplingParams, Step, TokenLogprobs

Scores = NDArray[np.float32]  # [vocab]

#: How many of the best tokens top-p looks at first, and then; only a flat distribution needs more.
NUCLEUS_TRIES = (128, 512, 2048)
#: The most weights that top-p sorts.
MAX_SORTED = 1024
#: Tokens whose weights are summed up together, for a draw from all of them.
BLOCK = 256
#: The most values in a group, of which `reached_by` looks at the best only.
GROUP = 64

_MASK = 2**64 - 1


class Sampler:
    """Has no state: what it needs of a request's past is in the request."""

    def sample(self, logits: NDArray[np.float32], step: Step) -> list[Sampled | None]:
        """logits [R, vocab]: one for each row that wants one. The result is in the order of `step.rows`, None
        where no logits were wanted. A row of logits that is not finite fails its own request, no other.
        """
        best = logits.argmax(axis=1).tolist() if len(logits) else []
        result: list[Sampled | None] = []
        wanted = 0
        for row in step.rows:
            if row.num_logits:
                result.append(_sampled(logits[wanted], best[wanted], row.request))
                wanted += 1
            else:
                result.append(None)
        assert wanted == len(logits), "one row of logits for each row that wants one"
        return result


def _sampled(logits: Scores, best: int, request: Request) -> Sampled:
    """best: of the raw logits [vocab], where NaN counts as the largest."""
    params = request.params
    if not math.isfinite(logits.item(best)):
        return Sampled(error=EngineFailure(f"the logits are not finite at token {request.num_tokens}"))
    if params.is_plain and len(request.output_ids) >= params.min_tokens:
        token = best
    else:
        try:
            token = choose(logits, request)
        except InvalidArgument as e:
            return Sampled(error=e)
    wanted = params.logprobs
    return Sampled(token, None if wanted is None else log_probabilities(logits, token, wanted))


def choose(logits: Scores, request: Request) -> int:
    """The token of one request from its raw logits [vocab].

    Raises InvalidArgument if the request's own parameters leave no token.
    """
    scores = process(logits, request)
    best = int(scores.argmax())
    if not math.isfinite(scores.item(best)):
        raise InvalidArgument(
            f"no token is left at position {request.num_tokens}: bad_words and logit_bias ban all"
        )
    if request.params.is_greedy:
        return best
    return candidates(scores, request.params).draw(uniform(request.seed, request.num_tokens))


# -- what a request's past does to its scores
# ----------------------------------------------------------------------


def process(logits: Scores, request: Request) -> Scores:
    """Bias, penalties, bad words and min_tokens, in this order; on a copy, if they change anything."""
    params, banned = request.params, len(request.output_ids) < request.params.min_tokens
    if params.keeps_scores and not banned:
        return logits
    scores = logits.copy()
    if params.logit_bias:
        scores[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    _penalize(scores, request)
    for word in params.bad_words:
        if len(word) == 1 or ends_with(request, word[:-1]):
            scores[word[-1]] = -np.inf
    if banned:
        scores[list(request.end_ids)] = -np.inf
    return scores


def _penalize(scores: Scores, request: Request) -> None:
    """In place. Repetition (Keskar et al. 2019) over prompt and output, presence and frequency (OpenAI) over the
    output.
    """
    p = request.params
    if p.repetition_penalty != 1.0:
        seen = np.array(request.prompt_ids + request.output_ids)  # some twice, which get the same value twice
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
    """The tokens that are left, in ascending order, and their weights: not negative, not normalized; FP32 if the
    tokens are the whole vocabulary, in which those that are banned have 0, else FP64.

    tokens: None for the whole vocabulary.
    """

    tokens: NDArray[np.intp] | None
    weights: NDArray[Any]

    def take(self, indices: NDArray[np.intp]) -> "Candidates":
        tokens = indices if self.tokens is None else self.tokens[indices]
        return Candidates(tokens, self.weights[indices].astype(np.float64))

    def draw(self, u: float) -> int:
        """The token at the share u, in [0, 1), of the weight; never one whose weight is 0."""
        if len(self.weights) <= 4 * BLOCK:
            i = at_share(self.weights, u)[0]
        else:
            block, rest = at_share(block_sums(self.weights), u)
            i = block * BLOCK + at_share(self.weights[block * BLOCK :][:BLOCK], rest)[0]
        return i if self.tokens is None else int(self.tokens[i])


def candidates(scores: Scores, params: SamplingParams) -> Candidates:
    """Temperature, top-k, top-p and min-p, in this order, on scores [vocab] of which at least one is
    finite.
    """
    best, bound = scores.max(), -math.inf
    if 0 < params.top_k < len(scores):
        bound = kth_best(scores, params.top_k)  # ties with the last one stay
    elif params.top_p == 1.0 and params.min_p > 0.0:
        # A little lower than it is; the weights decide below.
        bound = float(best) + params.temperature * (math.log(params.min_p) - 0.01)
    if bound > -math.inf:
        tokens = np.flatnonzero(scores >= bound)
        some = scores[tokens].astype(np.float64)
        left = Candidates(tokens, np.exp((some - float(best)) / params.temperature))
    else:
        with np.errstate(
            over="ignore"
        ):  # what is so far below the best that FP32 has no number for it weighs 0
            weights = scores - best
            weights /= np.float32(params.temperature)
        left = Candidates(None, np.exp(weights, out=weights))
    if params.top_p < 1.0:
        left = _nucleus(left, params.top_p)
    if params.min_p > 0.0:
        left = left.take(np.flatnonzero(left.weights >= params.min_p * left.weights.max()))
    return left


def _nucleus(left: Candidates, top_p: float) -> Candidates:
    """The smallest set of the best tokens whose probabilities reach top_p (Holtzman et al. 2020); at least
    one. Of equals those with the smallest ids.
    """
    weights = left.weights
    enough = top_p * float(block_sums(weights).sum())
    rest, taken = weights, 0  # rest: where the end is; taken: of the better ones, all in for certain
    for count in NUCLEUS_TRIES:
        if count * 4 < len(weights):
            best = weights[weights >= reached_by(weights, count)]
            if best.sum(dtype=np.float64) >= enough:
                rest = best
                break
    while len(rest) > MAX_SORTED:
        bound = np.sort(rest[:: len(rest) // 128])[64]
        is_best = rest >= bound
        if is_best.all():
            is_best = rest > bound
            if not is_best.any():  # all are alike
                break
        best = rest[is_best]
        weight = float(best.sum(dtype=np.float64))
        if weight < enough:
            enough, taken, rest = enough - weight, taken + len(best), rest[~is_best]
        else:
            rest = best
    rest = -np.sort(-rest)
    last = min(int(rest.cumsum(dtype=np.float64).searchsorted(enough, side="left")), len(rest) - 1)
    kept = np.flatnonzero(weights >= rest[last])
    if surplus := len(kept) - (taken + last + 1):
        equal = np.flatnonzero(weights[kept] == rest[last])
        kept = np.delete(kept, equal[-surplus:])
    return left.take(kept)


def kth_best(values: NDArray[Any], k: int) -> float:
    """The k-th largest value, counted with repetition; k from 1 to all of them."""
    few = values[values >= reached_by(values, k)]
    return float(np.partition(few, len(few) - k)[len(few) - k])


def reached_by(values: NDArray[Any], count: int) -> float:
    """A bound that at least `count` of the values reach, and not many more: the count-th largest of what groups of
    them have as their largest. A pass over the values in order, where a partition jumps about in them."""
    groups = max(len(values) // GROUP, 4 * count // 3)  # were there fewer, their largest would tell little
    size = len(values) // groups
    if size < 2:
        return float(np.partition(values, len(values) - count)[len(values) - count])
    largest = values[: size * groups].reshape(size, groups).max(axis=0)
    return float(np.partition(largest, groups - count)[groups - count])


def block_sums(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Of each BLOCK of the weights, in order."""
    return np.add.reduceat(weights, np.arange(0, len(weights), BLOCK)).astype(np.float64)


def at_share(weights: NDArray[Any], u: float) -> tuple[int, float]:
    """(The index at the share u of the cumulative weight, which part of its own weight lies before that, both in
    [0, 1)). Never one whose weight is 0; at least one is more."""
    cumulative = weights.cumsum(dtype=np.float64)
    total = cumulative.item(-1)
    last = int(cumulative.searchsorted(total, side="left"))
    i = min(int(cumulative.searchsorted(u * total, side="right")), last)
    before = cumulative.item(i - 1) if i else 0.0
    return i, min(max((u * total - before) / (cumulative.item(i) - before), 0.0), 1.0)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from the counter-based generator Philox4x64 (Salmon et al. 2011), its first word.

    In plain integers, which takes half the time of making NumPy's generator."""
    key0, key1 = seed & _MASK, 0
    a, b, c, d = (position + 1) & _MASK, 0, 0, 0
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (q >> 64) ^ b ^ key0, q & _MASK, (p >> 64) ^ d ^ key1, p & _MASK
        key0, key1 = (key0 + 0x9E3779B97F4A7C15) & _MASK, (key1 + 0xBB67AE8584CAA73B) & _MASK
    return (a >> 11) * 2.0**-53


def log_probabilities(logits: Scores, token: int, top: int) -> TokenLogprobs:
    """Of the raw logits [vocab]: the chosen token's, and the `top` best with theirs, best first. The weights are
    FP32, which is good to 1e-6."""
    best = logits.max()
    with np.errstate(over="ignore"):
        weights = logits - best
    total = float(best) + math.log(block_sums(np.exp(weights, out=weights)).sum())
    if not top:
        return TokenLogprobs(logits.item(token) - total)
    top = min(top, len(logits))
    few = np.flatnonzero(logits >= kth_best(logits, top))
    few = few[np.lexsort((few, -logits[few]))][:top]
    return TokenLogprobs(logits.item(token) - total, tuple((int(t), logits.item(t) - total) for t in few))
