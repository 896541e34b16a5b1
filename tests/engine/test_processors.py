"""The logit processors equal transformers' own."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.common.engine.processors import distributions
from services.common.specdec.types import BadRowError, Row, SamplingParams, check_row

VOCAB = 400


def reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    return torch.softmax(warpers(ids, logits.float()), dim=-1).numpy()


def assert_equal(logits: torch.Tensor, params: SamplingParams) -> list[Row]:
    rows = distributions(logits, params)
    for row, expected in zip(rows, reference(logits, params), strict=True):
        check_row(row, logits.shape[1])
        assert row.weights.dtype == np.float32
        actual = row.dense(logits.shape[1])
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-9)
    return rows


def assert_equal_but_for_ties(logits: torch.Tensor, params: SamplingParams) -> None:
    """Which of the tokens tied at top-p's cut stay is the luck of an unstable sort; how many do is not."""
    for row, expected, scores in zip(
        distributions(logits, params), reference(logits, params), logits.float().numpy(), strict=True
    ):
        actual = row.dense(logits.shape[1])
        np.testing.assert_allclose(np.sort(actual), np.sort(expected), rtol=2e-5, atol=1e-9)
        differ = (actual > 0) != (expected > 0)
        assert len(set(scores[differ])) <= 1, "only tokens with one and the same score may be exchanged"


def random_logits(seed: int, scale: float = 3.0, rows: int = 4, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 5.0, 100.0])
def test_equal_for_every_combination(temperature: float) -> None:
    for i, (top_k, top_p, min_p) in enumerate(
        itertools.product([0, 1, 7, VOCAB, VOCAB + 5], [1.0, 0.9, 0.5, 1e-6], [0.0, 0.05, 1.0])
    ):
        assert_equal(random_logits(i), SamplingParams(temperature, top_k, top_p, min_p))


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 3, 10])
def test_ties_are_kept_and_dropped_as_transformers_does(top_k: int, top_p: float) -> None:
    # Steps of one half: every row is full of ties, at the cuts too. Up to 16 tokens torch's sort is stable.
    for seed in range(40):
        few = (random_logits(seed, vocab=16) * 2).round() / 2
        assert_equal(few, SamplingParams(1.0, top_k, top_p, 0.0))
        many = (random_logits(seed, vocab=60) * 2).round() / 2
        assert_equal_but_for_ties(many, SamplingParams(1.0, top_k, top_p, 0.0))
        assert_equal_but_for_ties(many.bfloat16(), SamplingParams(0.5, top_k, top_p, 0.1))


@pytest.mark.parametrize("vocab", [2, 3, 4, 5, 10, 1000])
def test_uniform_rows_are_cut_where_transformers_cuts_them(vocab: int) -> None:
    for top_p in (0.1, 0.25, 0.5, 0.75, 0.8, 0.9):
        assert_equal_but_for_ties(torch.zeros(1, vocab), SamplingParams(1.0, 0, top_p, 0.0))
        # The same among tokens that are ruled out.
        apart = torch.full((1, 3 * vocab), -math.inf)
        apart[0, ::3] = 0
        assert_equal_but_for_ties(apart, SamplingParams(1.0, 0, top_p, 0.0))


def test_impossible_tokens_stay_impossible() -> None:
    logits = random_logits(1)
    logits[:, ::2] = -math.inf
    logits[1, 1:] = -math.inf
    logits[1, 0] = 0.5
    for params in (
        SamplingParams(),
        SamplingParams(top_k=VOCAB - 1),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.01),
        SamplingParams(0.7, 50, 0.9, 0.01),
    ):
        rows = assert_equal(logits, params)
        assert rows[1].weight(0) == 1.0


def test_large_vocabulary_like_a_models() -> None:
    # A few likely tokens and a long tail, as a language model has: the fast path of top-p.
    logits = random_logits(3, scale=2.5, vocab=49_152)
    for params in (
        SamplingParams(0.7, 0, 0.9, 0.0),
        SamplingParams(1.0, 0, 0.95, 0.0),
        SamplingParams(1.0, 50, 0.9, 0.02),
    ):
        assert_equal(logits, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_cast_first(dtype: torch.dtype) -> None:
    assert_equal(random_logits(5).to(dtype), SamplingParams(0.8, 20, 0.9, 0.01))


def test_tiny_temperature_is_the_argmax_and_never_overflows() -> None:
    logits = random_logits(7)
    for row, best in zip(distributions(logits, SamplingParams(1e-40)), logits.argmax(-1).tolist(), strict=True):
        assert row.ids is not None
        assert row.ids.tolist() == [best]
        assert row.weights.tolist() == [1.0]


def test_greedy_takes_the_first_of_ties() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert [
        row.ids.tolist() for row in distributions(logits, SamplingParams(0.0, 3, 0.5, 0.5)) if row.ids is not None
    ] == [[1], [0]]


def test_sparse_exactly_where_it_is_smaller() -> None:
    logits = random_logits(11, vocab=100)
    for top_k, sparse in ((49, True), (50, False)):
        for row in distributions(logits, SamplingParams(top_k=top_k)):
            assert (row.ids is not None) == sparse
            assert row.nbytes == min(8 * top_k, 4 * 100)
    # Full rows in which most entries round to 0 as well.
    for row in distributions(logits, SamplingParams(0.01)):
        assert row.ids is not None
        assert (row.weights > 0).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.0),
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(0.7, 5, 0.9, 0.1),
    ],
)
def test_bad_logits_come_out_bad_and_cost_no_other_row(params: SamplingParams) -> None:
    good = random_logits(13)
    bad = good.clone()
    bad[1, 7] = math.nan
    bad[2, 3] = math.inf
    bad[3, :] = -math.inf
    rows = distributions(bad, params)
    for row in rows[1:]:
        with pytest.raises(BadRowError, match="non-finite"):
            check_row(row, VOCAB)
    np.testing.assert_array_equal(rows[0].dense(VOCAB), distributions(good, params)[0].dense(VOCAB))
    assert len(distributions(bad[1:2], params)) == 1


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    logits = random_logits(17, rows=6)
    for params in (SamplingParams(), SamplingParams(top_k=9), SamplingParams(0.7, 0, 0.8, 0.0)):
        together = distributions(logits, params)
        for i, row in enumerate(together):
            (alone,) = distributions(logits[i : i + 1], params)
            np.testing.assert_array_equal(alone.dense(VOCAB), row.dense(VOCAB))
