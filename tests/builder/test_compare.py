"""The numbers of `verify`, against their textbook formulas and at their extremes."""

import math

import numpy as np
import pytest

from trtforge.builder.compare import Comparer, Comparison, Limits

LIMITS = Limits(mean_kl=0.01, top1_agreement=0.9, perplexity_ratio=1.05)


def compare(logits: np.ndarray, reference: np.ndarray, next_ids: np.ndarray, pieces: int = 1) -> Comparison:
    comparer = Comparer()
    for part in np.array_split(np.arange(len(logits)), pieces):
        comparer.add(logits[part], reference[part], next_ids[part])
    return comparer.result()


def test_equal_logits_differ_in_nothing(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(7, 50)).astype(np.float32)
    result = compare(logits, logits, rng.integers(0, 50, 7))
    assert result.mean_kl == result.max_kl == result.max_logit_difference == 0
    assert result.top1_agreement == 1
    assert result.perplexity == result.reference_perplexity
    assert not result.faults(LIMITS)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    logits = np.full((3, 64), 5.0, np.float32)
    assert compare(logits, logits, np.array([0, 1, 2])).perplexity == pytest.approx(64)


def test_kl_of_two_outcomes() -> None:
    p, q = 0.9, 0.6
    reference = np.log(np.array([[p, 1 - p]], np.float32))
    logits = np.log(np.array([[q, 1 - q]], np.float32)) + 3  # a shift of all logits changes nothing
    result = compare(logits, reference, np.array([0]))
    assert result.mean_kl == pytest.approx(
        p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-5
    )
    assert result.perplexity == pytest.approx(1 / q, rel=1e-6)
    assert result.reference_perplexity == pytest.approx(1 / p, rel=1e-6)


def test_the_pieces_in_which_rows_come_do_not_matter(rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(2, 11, 40)).astype(np.float32)
    ids = rng.integers(0, 40, 11)
    whole, parts = compare(a, b, ids), compare(a, b, ids, pieces=4)
    assert parts.mean_kl == pytest.approx(whole.mean_kl)
    assert (parts.top1_agreement, parts.max_kl) == (whole.top1_agreement, whole.max_kl)


def test_one_near_tie_of_a_short_text_is_no_fault(rng: np.random.Generator) -> None:
    reference = rng.normal(size=(5, 20)).astype(np.float32)
    reference[:, :2] = 9, 9.00001  # of about equal likelihood
    logits, ids = reference.copy(), np.zeros(5, int)
    logits[2, 0] = 9.00002
    assert compare(logits, reference, ids).top1_agreement == 0.8
    assert not compare(logits, reference, ids).faults(LIMITS)
    logits[3, 0] = 9.00002
    assert len(compare(logits, reference, ids).faults(LIMITS)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_engine_is_past_every_limit(bad: float, rng: np.random.Generator) -> None:
    reference = rng.normal(size=(4, 20)).astype(np.float32)
    logits = reference.copy()
    logits[2, 3] = bad
    with np.errstate(invalid="ignore"):
        assert len(compare(logits, reference, np.zeros(4, int)).faults(LIMITS)) >= 2


def test_each_limit_is_named(rng: np.random.Generator) -> None:
    reference = 5 * rng.normal(size=(50, 20)).astype(np.float32)
    faults = compare(-reference, reference, reference.argmax(axis=1)).faults(LIMITS)
    assert [fault.split()[0] for fault in faults] == ["mean", "top-1", "perplexity"]
