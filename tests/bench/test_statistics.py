from __future__ import annotations

import numpy as np
import pytest

from bench.statistics import paired_ratio


def test_a_constant_ratio_has_no_spread() -> None:
    slow = np.array([[4.0, 8.0], [1.0, 2.0], [6.0, 10.0]])
    ratio = paired_ratio(slow, slow / 2)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_mean_is_geometric_so_that_swapping_inverts_it() -> None:
    a, b = np.array([[1.0], [4.0]]), np.array([[4.0], [1.0]])
    assert paired_ratio(a, b).value == pytest.approx(1.0)
    a, b = np.array([[2.0], [3.0]]), np.array([[1.0], [7.0]])
    forth, back = paired_ratio(a, b), paired_ratio(b, a)
    assert forth.value * back.value == pytest.approx(1.0)
    assert forth.low * back.high == pytest.approx(1.0)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(50):
        logs = np.log(1.25) + random.normal(0, 0.2, (12, 1)) + random.normal(0, 0.05, (12, 2))
        ratio = paired_ratio(np.exp(logs), np.ones((12, 2)))
        covered += ratio.low <= 1.25 <= ratio.high
    assert 41 <= covered <= 50


def test_what_pairs_share_cancels() -> None:
    random = np.random.default_rng(1)
    shared = np.exp(random.normal(0, 1.0, (12, 2)))
    own = np.exp(random.normal(0, 0.01, (12, 2)))
    ratio = paired_ratio(1.1 * shared * own, shared)
    assert 1.09 < ratio.low < ratio.high < 1.11


def test_one_slow_repeat_does_not_count() -> None:
    slow = np.array([[4.0, 4.0, 40.0], [2.0, 2.0, 2.0]])
    assert paired_ratio(slow, slow / np.array([[2, 2, 20], [2, 2, 2]])).value == pytest.approx(2.0)
