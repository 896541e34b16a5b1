"""The formulas of what speculation gives, against enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.specdec.acceptance import accept_probability
from services.common.specdec.analysis import expected_speedup, expected_tokens, overlap
from tests.specdec.rows import PAIRS, VOCAB, forms, normalised


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
