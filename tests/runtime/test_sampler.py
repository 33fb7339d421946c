"""The sampler against Hugging Face's own logits processors, its distributions by chi-square, its seeds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from trtforge.plugins.errors import EngineFailure, InvalidArgument
from trtforge.runtime.request import Request, Rows, SamplingParams, Step
from trtforge.runtime.sampler import (
    BLOCK,
    Candidates,
    Sampler,
    candidates,
    choose,
    kth_best,
    log_probabilities,
    process,
    reached_by,
    uniform,
)

VOCAB = 1000


def make(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Request:
    p = SamplingParams(**{"max_tokens": 100, **params})
    request = Request(
        "r", prompt or [1, 2, 3], p, seed=p.seed or 0, max_tokens=p.max_tokens, end_ids=frozenset({0})
    )
    request.output_ids = output or []
    return request


def sample(logits: np.ndarray, *requests: Request) -> list[Any]:
    rows = tuple(Rows(r, r.num_tokens - 1, 1, 1) for r in requests)
    return Sampler().sample(logits.astype(np.float32), Step(rows))


def logits(seed: int, scale: float = 3.0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def through(processor: Any, ids: list[int], scores: np.ndarray) -> np.ndarray:
    return np.asarray(processor(torch.tensor([ids]), torch.tensor(scores)[None])[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 2.0])
def test_repetition_penalty_is_hugging_faces(seed: int, penalty: float) -> None:
    request = make([1, 5, 5, 9], [7, 5, 100], repetition_penalty=penalty)
    expected = through(
        hf.RepetitionPenaltyLogitsProcessor(penalty), request.prompt_ids + request.output_ids, logits(seed)
    )
    np.testing.assert_array_equal(process(logits(seed), request), expected)


def test_bad_words_are_hugging_faces() -> None:
    words = [[5], [7, 8], [3, 4, 6], [2, 9]]
    for output in ([], [7], [3, 4], [4, 3, 4], [2, 9]):
        request = make([1, 2], output, bad_words=tuple(map(tuple, words)))
        expected = through(hf.NoBadWordsLogitsProcessor(words, eos_token_id=0), [1, 2, *output], logits(1))
        np.testing.assert_array_equal(process(logits(1), request), expected)


def test_min_tokens_masks_end_tokens_until_there_are_enough() -> None:
    for n in range(5):
        request = make([1, 2], [4] * n, min_tokens=3)
        expected = through(
            hf.MinNewTokensLengthLogitsProcessor(2, 3, [0], device="cpu"), [1, 2] + [4] * n, logits(1)
        )
        np.testing.assert_array_equal(process(logits(1), request), expected)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    raw, request = logits(2), make([5, 5, 5], [7, 8, 7, 7], presence_penalty=0.5, frequency_penalty=0.25)
    expected = raw.copy()
    expected[7] -= 0.5 + 3 * 0.25
    expected[8] -= 0.5 + 1 * 0.25
    np.testing.assert_allclose(process(raw, request), expected, rtol=1e-6)


def test_logit_bias_is_added_first() -> None:
    raw = np.zeros(VOCAB, np.float32)
    request = make([5], [], logit_bias={5: 2.0, 6: -100.0}, repetition_penalty=2.0)
    changed = process(raw, request)
    assert (changed[5], changed[6], changed[7]) == (1.0, -100.0, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "cuts",
    [
        {"temperature": 0.7},
        {"top_k": 1000},
        {"top_k": 7},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.3, "top_k": 5, "top_p": 0.4},
    ],
    ids=str,
)
def test_the_cuts_leave_what_hugging_faces_leave(seed: int, cuts: dict[str, Any]) -> None:
    raw, params = logits(seed), SamplingParams(**{"temperature": 1.0, **cuts})
    scores = through(hf.TemperatureLogitsWarper(params.temperature), [1], raw)
    if params.top_k:
        scores = through(hf.TopKLogitsWarper(params.top_k), [1], scores)
    if params.top_p < 1:
        scores = through(hf.TopPLogitsWarper(params.top_p), [1], scores)
    if params.min_p:
        scores = through(hf.MinPLogitsWarper(params.min_p), [1], scores)
    left = candidates(raw, params)
    tokens = np.arange(VOCAB) if left.tokens is None else left.tokens
    np.testing.assert_array_equal(tokens, np.flatnonzero(np.isfinite(scores)))
    probabilities = torch.tensor(scores).double().softmax(0).numpy()[tokens]
    np.testing.assert_allclose(left.weights / left.weights.sum(), probabilities, rtol=1e-5)


def test_a_flat_distribution_needs_more_than_the_best_few() -> None:
    raw = logits(3, scale=0.01, vocab=20_000)
    left = candidates(raw, SamplingParams(temperature=1.0, top_p=0.7))
    scores = through(hf.TopPLogitsWarper(0.7), [1], raw)
    assert (
        abs(len(left.tokens) - int(np.isfinite(scores).sum())) <= 1
    )  # the last one is a question of rounding
    assert len(left.tokens) > 13_000


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations of its own distribution (Wilson and Hilferty 1931)."""
    dof = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return ((statistic / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / math.sqrt(2 / (9 * dof))


@pytest.mark.parametrize(
    "cuts", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_tokens_are_drawn_with_their_probabilities(cuts: dict[str, Any]) -> None:
    raw, draws = logits(4, scale=1.0, vocab=20), 20_000
    params = SamplingParams(**{"temperature": 1.0, **cuts})
    left = candidates(raw, params)
    expected = left.weights / left.weights.sum() * draws
    observed = np.zeros(20)
    for position in range(draws):
        observed[left.draw(uniform(11, position))] += 1
    of_left = observed if left.tokens is None else observed[left.tokens]
    assert observed.sum() == of_left.sum(), "a token was drawn that had been cut"
    assert abs(chi_square(of_left, expected)) < 4
    # The check can fail: the same draws are not those of slightly other probabilities.
    assert chi_square(of_left, np.roll(expected, 1)) > 10


def test_tokens_of_a_large_vocabulary_are_drawn_with_their_probabilities() -> None:
    """From all tokens, block by block; every seventh is banned."""
    vocab, draws = 9 * BLOCK + 37, 20_000
    raw = logits(5, scale=0.3, vocab=vocab)
    raw[::7] = -np.inf
    left = candidates(raw, SamplingParams(temperature=1.0))
    assert left.tokens is None
    drawn = [left.draw(uniform(3, position)) for position in range(draws)]
    assert all(token % 7 for token in drawn)
    expected = torch.tensor(raw).double().softmax(0).numpy() * draws
    bins = np.arange(vocab) // 29  # not aligned with the blocks
    observed = np.bincount(bins[drawn], minlength=bins[-1] + 1)
    assert abs(chi_square(observed, np.bincount(bins, expected))) < 4
    assert chi_square(observed, np.roll(np.bincount(bins, expected), 1)) > 10


def test_the_ends_of_a_share_are_tokens_with_a_weight() -> None:
    weights = np.zeros(5 * BLOCK, np.float32)
    weights[[BLOCK + 3, 3 * BLOCK]] = 1e-3, 7e-3
    left = Candidates(None, weights)
    shares = [0.0, 0.1, 0.1249, 0.1251, 0.5, 1 - 2**-53]
    assert [left.draw(u) for u in shares] == [BLOCK + 3] * 3 + [3 * BLOCK] * 3


def test_uniform_is_numpys_philox() -> None:
    for seed, position in ((0, 0), (42, 7), (-1, 5), (2**64 - 1, 2**31), (2**70 + 3, 1)):
        key = np.array([seed % 2**64, 0], np.uint64)
        raw = int(np.random.Philox(key=key, counter=[position, 0, 0, 0]).random_raw())
        assert uniform(seed, position) == (raw >> 11) * 2.0**-53


@pytest.mark.parametrize("vocab", [1, 2, 63, 1000, 20_000])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 300.0])
def test_the_nucleus_is_what_sorting_everything_finds(vocab: int, scale: float) -> None:
    """Of weights with many equals, and of weights that are 0 in FP32."""
    raw = np.round(logits(6, scale, vocab) * 4) / 4
    weights = candidates(raw, SamplingParams(temperature=1.0)).weights
    order = np.argsort(-weights, kind="stable")
    cumulative = weights[order].cumsum(dtype=np.float64)
    for top_p in (1e-9, 0.3, 0.95, 0.999):
        count = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
        left = candidates(raw, SamplingParams(temperature=1.0, top_p=top_p))
        assert left.tokens is not None
        if scale and len(left.tokens) != count:  # a question of rounding
            assert abs(cumulative[count - 1] / cumulative[-1] - top_p) < 1e-6
            assert abs(len(left.tokens) - count) <= 1
        else:
            np.testing.assert_array_equal(left.tokens, np.sort(order[: len(left.tokens)]))


@pytest.mark.parametrize("vocab", [1, 63, 64, 1000, 20_000])
def test_the_kth_best_is_what_sorting_finds(vocab: int) -> None:
    for raw in (logits(7, vocab=vocab), np.round(logits(8, vocab=vocab))):
        descending = -np.sort(-raw)
        for k in {1, 2, 50, vocab // 100, vocab // 2, vocab - 1, vocab} & set(range(1, vocab + 1)):
            assert kth_best(raw, k) == descending[k - 1]
            assert (raw >= reached_by(raw, k)).sum() >= k


def test_nothing_sorts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither wholly nor in parts: what is sorted is of some hundred values, seldom of some thousand."""
    sizes = []
    for name in ("sort", "argsort", "partition", "argpartition", "lexsort", "unique"):
        function = getattr(np, name)

        def watched(values: Any, *args: Any, _function: Any = function, **kwargs: Any) -> Any:
            sizes.append(np.shape(values)[-1])
            return _function(values, *args, **kwargs)

        monkeypatch.setattr(np, name, watched)
    raw = logits(9, vocab=50_000)
    for params in (
        {},
        {"top_k": 50},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 5.0, "top_p": 0.9},
        {"logprobs": 20},
        {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    ):
        sample(raw[None], make([1, 2], [3, 4], **{"temperature": 1.0, **params}))
    assert sizes, "nothing was watched"
    assert max(sizes) <= 50_000 // 16


def test_logits_are_left_as_they_are() -> None:
    """They are the executor's memory."""
    raw = logits(1)[None]
    raw.flags.writeable = False
    for params in (
        {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.1},
        {"min_tokens": 5},
        {"logprobs": 3, "logit_bias": {3: 1.0}},
    ):
        assert Sampler().sample(raw, Step((Rows(make(**params), 2, 1, 1),)))[0].error is None


def test_uniform_is_uniform_and_keyed_by_seed_and_position() -> None:
    values = np.array([uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(4000)])
    assert (values >= 0).all() and (values < 1).all()
    assert len(set(values)) == len(values)
    assert abs(chi_square(np.histogram(values, 50, (0, 1))[0], np.full(50, len(values) / 50))) < 4
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) != uniform(2**64 - 2, 3), "a large seed is not rounded"


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    def mine() -> Request:
        return make([1, 2], [3], temperature=1.0, seed=42)

    others = [make([9], [1] * n, temperature=1.0, seed=n) for n in range(3)]
    rows = np.stack([logits(i) for i in range(4)])
    one = sample(rows[:1], mine())[0].token_id
    assert sample(rows[[1, 2, 0]], others[0], others[1], mine())[2].token_id == one
    assert sample(rows, mine(), *others)[0].token_id == one
    tokens = {sample(rows[:1], make([1, 2], [3], temperature=1.0, seed=s))[0].token_id for s in range(50)}
    assert len(tokens) > 10, "another seed gives another token"


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    raw = logits(5)
    assert sample(raw[None], make())[0].token_id == raw.argmax()
    assert sample(np.zeros((1, 9)), make())[0].token_id == 0
    for params in ({"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}):
        assert sample(raw[None], make(**params))[0].token_id == raw.argmax()


def test_only_rows_that_want_a_token_get_one() -> None:
    a, b = make(), make()
    step = Step((Rows(a, 0, 2, 0), Rows(b, 2, 1, 1)))
    result = Sampler().sample(logits(1)[None], step)
    assert result[0] is None
    assert result[1] is not None and result[1].token_id == logits(1).argmax()
    assert Sampler().sample(np.empty((0, VOCAB), np.float32), Step((Rows(a, 0, 2, 0),))) == [None]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_logits_that_are_not_finite_fail_their_own_request(poison: float, params: dict[str, Any]) -> None:
    rows = np.stack([logits(1), logits(2), logits(3)])
    rows[1, 17] = poison
    result = sample(rows, make(), make(**params), make())
    assert isinstance(result[1].error, EngineFailure)
    assert [result[i].token_id for i in (0, 2)] == [rows[0].argmax(), rows[2].argmax()]


def test_no_token_left_is_the_requests_own_fault() -> None:
    everything = tuple((t,) for t in range(VOCAB))
    assert isinstance(sample(logits(1)[None], make(bad_words=everything))[0].error, InvalidArgument)


def test_extreme_scores_never_make_a_nan() -> None:
    raw = logits(1)
    raw[:] = -1e38
    raw[3], raw[4] = 1e38, 3e38
    for params in (
        {"temperature": 0.01},
        {"temperature": 1000.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 1.0},
    ):
        assert choose(raw, make(seed=1, **params)) == 4
    masked = np.full(VOCAB, -np.inf, np.float32)
    masked[7] = 0
    assert choose(masked, make(temperature=1.0)) == 7


def test_logprobs_are_of_the_raw_distribution() -> None:
    raw = logits(6)
    expected = torch.tensor(raw).double().log_softmax(0)
    result = sample(raw[None], make(temperature=0.5, top_k=3, logprobs=4, repetition_penalty=1.5))[0]
    assert result.logprobs.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-6)
    values, tokens = expected.topk(4)
    assert [t for t, _ in result.logprobs.top] == tokens.tolist()
    assert [p for _, p in result.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert log_probabilities(raw, 5, 0).top == ()
    assert len(log_probabilities(raw, 5, 10**6).top) == VOCAB
    assert sample(raw[None], make())[0].logprobs is None


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"min_tokens": 129},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logprobs": -1},
        {"logprobs": 101},
        {"stop": ("",)},
        {"bad_words": ((),)},
        {"bad_words": ((VOCAB,),)},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 1e39}},
    ],
    ids=str,
)
def test_params_out_of_range_are_refused_by_name(bad: dict[str, Any]) -> None:
    SamplingParams().check(VOCAB)
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        SamplingParams(**bad).check(VOCAB)
