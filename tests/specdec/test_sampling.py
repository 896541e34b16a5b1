"""Drawing one token with one uniform."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.specdec.sampling import sample
from services.common.specdec.types import Row
from tests.specdec.rows import dense, sparse

ALMOST_ONE = 1 - 2.0**-53


def test_follows_the_cumulative_distribution() -> None:
    row = dense(0.25, 0.25, 0.0, 0.5)
    drawn = [sample(row, u) for u in (0.0, 0.2499, 0.25, 0.4999, 0.5, ALMOST_ONE)]
    assert drawn == [0, 0, 1, 1, 3, 3]


def test_sparse_rows_give_ids() -> None:
    row = sparse({7: 0.25, 100: 0.75})
    assert [sample(row, u) for u in (0.0, 0.2499, 0.25, ALMOST_ONE)] == [7, 7, 100, 100]


@pytest.mark.parametrize(
    ("row", "support"),
    [
        (dense(0.0, 0.0, 1.0, 0.0), {2}),
        (dense(0.0, 0.5, 0.0, 0.5, 0.0, 0.0), {1, 3}),
        (sparse({0: 0.0, 5: 1.0, 9: 0.0}), {5}),
    ],
)
def test_a_token_of_weight_zero_is_never_drawn(row: Row, support: set[int]) -> None:
    uniforms = [0.0, 5e-324, 0.5, float(np.nextafter(0.5, 0)), ALMOST_ONE, *np.linspace(0, ALMOST_ONE, 50)]
    assert {sample(row, float(u)) for u in uniforms} == support


def test_the_last_uniform_never_runs_off_the_end() -> None:
    # Sums that are no power of two: u * total can round up to total itself.
    rng = np.random.default_rng(3)
    for size in (1, 2, 3, 7, 1000):
        for _ in range(200):
            weights = np.append(rng.random(size), [0.0, 0.0])
            assert 0 <= sample(Row(weights), ALMOST_ONE) < size
    assert sample(Row(np.array([0.0, 5e-324, 0.0])), ALMOST_ONE) == 1


def test_float32_rounding_of_the_sum_does_not_favour_the_last_token() -> None:
    # Ten thousand equal float32 weights sum to 1.0000000475 in float64: the last token gets its share, no more.
    row = Row(np.full(10_000, 1e-4, np.float32))
    assert sample(row, 0.99989) == 9_998
    assert sample(row, 0.99991) == 9_999
    short = Row(np.full(10_000, 0.9999e-4, np.float32))
    assert sample(short, 0.99989) == 9_998


def test_unnormalised_weights_are_normalised() -> None:
    assert [sample(dense(2.0, 2.0), u) for u in (0.49, 0.51)] == [0, 1]


@pytest.mark.parametrize("size", [255, 256, 257, 5_000, 49_152])
def test_long_rows_are_drawn_as_their_cumulative_sum_says(size: int) -> None:
    rng = np.random.default_rng(size)
    weights = np.exp(rng.normal(0, 3, size)).astype(np.float32)
    # Whole stretches without mass, at both ends as well.
    for start in (0, size // 3, size - size // 5):
        weights[start : start + size // 5] = 0
    ends = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    for u in (0.0, 5e-324, ALMOST_ONE, *rng.random(300)):
        token = sample(Row(weights), float(u))
        assert weights[token] > 0
        # Within float64 rounding of the other order of summing.
        assert ends[token] - weights[token] / weights.sum() - 1e-6 <= u <= ends[token] + 1e-12


def test_every_token_with_mass_of_a_long_row_can_be_drawn() -> None:
    weights = np.zeros(1_024)
    support = [0, 255, 256, 511, 700, 1_023]
    weights[support] = 1
    drawn = [sample(Row(weights), (i + 0.5) / len(support)) for i in range(len(support))]
    edges = [sample(Row(weights), i / len(support)) for i in range(len(support))]
    assert drawn == edges == support
