"""Truncated drafting: what is sampled from is what is sent, and it is the head of what the request asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.common.engine.processors import distributions
from services.common.specdec.analysis import overlap
from services.common.specdec.types import Row, SamplingParams, check_row
from services.draft_worker.truncation import NO_TRUNCATION, Truncation

VOCAB = 2_000
REQUESTS = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(top_k=5),
    SamplingParams(top_k=500),
    SamplingParams(top_p=0.9),
    SamplingParams(1.3, 300, 0.8, 0.01),
    SamplingParams(min_p=0.02),
    SamplingParams(0.0),
]


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((4, VOCAB)).astype(np.float32) * 2)


@pytest.mark.parametrize("truncation", [Truncation(10), Truncation(100, 0.9), Truncation(0, 0.5), NO_TRUNCATION])
@pytest.mark.parametrize("params", REQUESTS, ids=str)
def test_it_is_the_head_of_the_processed_q(
    logits: torch.Tensor, params: SamplingParams, truncation: Truncation
) -> None:
    cut_rows = [truncation.cut(row) for row in distributions(logits, truncation.ahead(params))]
    for whole, cut in zip(distributions(logits, params), cut_rows, strict=True):
        check_row(cut, VOCAB)
        q = whole.dense(VOCAB)
        q /= q.sum()
        order = np.argsort(-q, kind="stable")[: truncation.top_k or VOCAB]
        if truncation.top_p < 1:
            order = order[np.cumsum(q[order]) - q[order] < truncation.top_p * q[order].sum()]
        expected = np.zeros(VOCAB)
        expected[order] = q[order] / q[order].sum()
        np.testing.assert_allclose(cut.dense(VOCAB), expected, rtol=1e-5, atol=1e-9)


def test_of_ties_the_lower_ids_stay() -> None:
    cut = Truncation(3).cut(Row(np.full(8, 0.125, np.float32)))
    assert cut.ids is not None
    assert cut.ids.tolist() == [0, 1, 2]
    np.testing.assert_allclose(cut.weights, 1 / 3)


def test_nothing_to_cut_off() -> None:
    row = Row(np.array([0.5, 0.5], np.float32), np.array([3, 9], np.uint32))
    assert Truncation(2).cut(row) is row
    assert NO_TRUNCATION.cut(row) is row


def test_alpha_lost_is_at_most_what_was_cut_off() -> None:
    """sum min(p, q') >= sum over the kept of min(p, q), since what is kept is scaled up."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        scores = 2 * rng.standard_normal(VOCAB)
        p, q = (np.exp(scores + rng.standard_normal(VOCAB)) for _ in range(2))
        p_row, q_row = Row(p / p.sum()), Row(q / q.sum())
        cut = Truncation(64).cut(q_row)
        dropped = 1 - float(q_row.weights[cut.ids].sum())
        before, after = overlap(p_row, q_row, VOCAB), overlap(p_row, cut, VOCAB)
        assert before - dropped <= after
        assert after < 1
