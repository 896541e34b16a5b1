"""Counter-based random numbers: pure, uniform, and no number for two decisions."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

from services.common.specdec.randomness import Purpose, uniform

SIGNIFICANCE = 1e-4
SEEDS = (0, 1, 2**64 - 1)


def numbers(seed: int, purpose: Purpose, rounds: int = 2_000, offsets: int = 9) -> np.ndarray:
    """float64[rounds, offsets]."""
    return np.array([[uniform(seed, r, o, purpose) for o in range(offsets)] for r in range(rounds)])


def test_is_a_pure_function() -> None:
    keys = list(itertools.product(SEEDS, (0, 5, 2**64 - 1), (0, 8), Purpose))
    first = [uniform(*key) for key in keys]
    assert [uniform(*key) for key in reversed(keys)] == first[::-1]


def test_is_pinned() -> None:
    # A change of the function changes every seeded answer: it has to be meant.
    assert uniform(1, 2, 3, Purpose.DRAFT) == 0.29037833327826934
    assert uniform(1, 2, 3, Purpose.ACCEPT) == 0.5018828410653215
    assert uniform(1, 2, 3, Purpose.REPLACE) == 0.3511384190134327


def test_no_number_serves_two_decisions() -> None:
    drawn = [
        uniform(seed, round_index, offset, purpose)
        for seed in (*SEEDS, 7)
        for round_index in range(200)
        for offset in range(9)
        for purpose in Purpose
    ]
    # 21,600 numbers of 53 bits: an accidental collision has probability 3e-8.
    assert len(set(drawn)) == len(drawn)


def test_is_in_the_half_open_unit_interval_and_uniform() -> None:
    for seed, purpose in itertools.product(SEEDS, Purpose):
        drawn = numbers(seed, purpose)
        assert drawn.min() >= 0
        assert drawn.max() < 1
        assert stats.kstest(drawn.ravel(), "uniform").pvalue > SIGNIFICANCE
        counts = np.histogram(drawn, bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > SIGNIFICANCE


def test_neighbours_are_independent() -> None:
    """Numbers that meet in one decision, or follow each other, fill the unit square evenly."""
    draft, keep, replace = (numbers(11, purpose) for purpose in Purpose)
    pairs = {
        "draft, accept": (draft, keep),
        "draft, replace": (draft, replace),
        "accept, replace": (keep, replace),
        "offset, next offset": (draft[:, :-1], draft[:, 1:]),
        "round, next round": (draft[:-1], draft[1:]),
        "position, same position a round later": (draft[:-1, 1:], draft[1:, :-1]),
        "seed, next seed": (draft, numbers(12, Purpose.DRAFT)),
    }
    for name, (x, y) in pairs.items():
        counts = np.histogram2d(x.ravel(), y.ravel(), bins=8, range=((0, 1), (0, 1)))[0]
        assert stats.chisquare(counts.ravel()).pvalue > SIGNIFICANCE, name
