"""The formulas of what speculation gives, against enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from services.common.specdec.acceptance import accept_probability
from services.common.specdec.analysis import agreement, expected_speedup, expected_tokens, overlap
from services.common.specdec.coupled import winner
from services.common.specdec.types import Row
from tests.specdec.rows import PAIRS, VOCAB, dense, forms, normalised


@pytest.mark.parametrize("kind", list(PAIRS))
def test_overlap_is_the_probability_that_a_draft_is_kept(kind: str) -> None:
    rng = np.random.default_rng([2, *kind.encode()])
    for _ in range(20):
        p, q = (forms(weights, rng) for weights in PAIRS[kind](rng))
        kept = sum(
            q_x * accept_probability(float(p_x), float(q_x))
            for p_x, q_x in zip(normalised(p), normalised(q), strict=True)
            if q_x > 0
        )
        assert overlap(p, q, VOCAB) == pytest.approx(kept, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 2, 8])
def test_expected_tokens_is_the_sum_over_branches(alpha: float, gamma: int) -> None:
    # A round of k kept drafts emits k + 1 tokens.
    branches = [(alpha**k * (1 - alpha), k + 1) for k in range(gamma)] + [(alpha**gamma, gamma + 1)]
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(p * n for p, n in branches))


def test_expected_speedup() -> None:
    assert expected_speedup(0.8, 0, draft_cost=0.1) == 1
    assert expected_speedup(0.8, 4, draft_cost=0.1) == pytest.approx(3.3616 / 1.4)
    assert expected_speedup(0.8, 4, draft_cost=0.1, wire_cost=0.1) == pytest.approx(3.3616 / 1.5)


@pytest.mark.parametrize("kind", list(PAIRS))
def test_agreement_is_the_formula_and_within_its_bounds(kind: str) -> None:
    rng = np.random.default_rng([3, *kind.encode()])
    for _ in range(20):
        p, q = (forms(weights, rng) for weights in PAIRS[kind](rng))
        p_all, q_all = normalised(p), normalised(q)
        terms = [
            1 / sum(max(p_all[j] / p_all[i], q_all[j] / q_all[i]) for j in range(VOCAB))
            for i in range(VOCAB)
            if p_all[i] > 0 and q_all[i] > 0
        ]
        assert agreement(p, q, VOCAB) == pytest.approx(sum(terms), abs=1e-12)
        kept = overlap(p, q, VOCAB)
        # With D = 1 - kept the total variation.
        assert kept / (2 - kept) - 1e-12 <= agreement(p, q, VOCAB) <= kept + 1e-12


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "disjoint"])
def test_agreement_is_how_often_the_two_winners_are_one(kind: str) -> None:
    rng = np.random.default_rng([4, *kind.encode()])
    p, q = (forms(weights, rng) for weights in PAIRS[kind](rng))
    same = sum(winner(p, seed, 11).token == winner(q, seed, 11).token for seed in range(5_000))
    expected = agreement(p, q, VOCAB)
    assert stats.binomtest(same, 5_000, min(expected, 1.0)).pvalue > 1e-4


def test_agreement_with_a_certain_draft_is_its_probability() -> None:
    """A guess that is certain of itself loses nothing by the coupled rule: both rules keep it with p."""
    p = dense(0.5, 0.2, 0.2, 0.1)
    for token, p_x in enumerate(p.weights):
        guess = Row.point_mass(token)
        assert agreement(p, guess, VOCAB) == pytest.approx(overlap(p, guess, VOCAB)) == pytest.approx(float(p_x))
