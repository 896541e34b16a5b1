"""How much of a row is asked for follows how often it was too little."""

from __future__ import annotations

import random
import statistics

import pytest

from services.coordinator.heads import LEAST_HEAD, MOST_HEAD, RowHeads


def settled(fetched: float, rounds: int = 20_000) -> list[int]:
    """Return the sizes of the later half of rounds, of which a share had to fetch a row."""
    heads, source, sizes = RowHeads(), random.Random(1), list[int]()
    for index in range(rounds):
        heads.count_round()
        if source.random() < fetched:
            heads.count_fetch()
        if index >= rounds // 2:
            sizes.append(heads.size)
    return sizes


def test_it_begins_between_its_bounds() -> None:
    assert LEAST_HEAD < RowHeads().size == 256 < MOST_HEAD


def test_a_fetch_makes_it_longer_by_half_an_octave_and_a_round_a_little_shorter() -> None:
    heads = RowHeads()
    heads.count_fetch()
    assert heads.size == round(256 * 2**0.5)
    heads.count_fetch()
    assert heads.size == 512
    sizes = []
    for _ in range(200):
        heads.count_round()
        sizes.append(heads.size)
    assert sizes == sorted(sizes, reverse=True)
    # 1.5% of half an octave each: 200 of them undo three fetches.
    assert sizes[-1] == round(512 / 2**1.5)


def test_it_keeps_within_its_bounds_and_comes_back_from_them_at_once() -> None:
    heads = RowHeads()
    for _ in range(10_000):
        heads.count_round()
    assert heads.size == LEAST_HEAD
    heads.count_fetch()
    assert heads.size == round(LEAST_HEAD * 2**0.5)
    for _ in range(100):
        heads.count_fetch()
    assert heads.size == MOST_HEAD
    for _ in range(134):
        heads.count_round()
    assert heads.size == round(MOST_HEAD / 2 ** (134 * 0.0075))


def test_laws_of_which_draws_rarely_fall_beyond_get_short_heads_and_others_long_ones() -> None:
    assert set(settled(0.0)) == {LEAST_HEAD}
    assert statistics.mean(settled(0.2)) > 0.95 * MOST_HEAD


@pytest.mark.parametrize("ideal", [100, 200, 400])
def test_it_settles_where_1_5_percent_of_rounds_fetch(ideal: int) -> None:
    """Draws that fall beyond a head of n in a share of `.015 ideal / n` of rounds: n goes to and fro about `ideal`."""
    heads, source = RowHeads(), random.Random(2)
    sizes, fetches = [], 0
    for index in range(60_000):
        beyond = source.random() < 0.015 * ideal / heads.size
        heads.count_round()
        if beyond:
            heads.count_fetch()
        if index >= 10_000:
            sizes.append(heads.size)
            fetches += beyond
    assert fetches / 50_000 == pytest.approx(0.015, rel=0.1)
    assert statistics.harmonic_mean(sizes) == pytest.approx(ideal, rel=0.1)


def test_a_size_that_is_fixed_stays() -> None:
    heads = RowHeads(7)
    for _ in range(50):
        heads.count_fetch()
        heads.count_round()
    assert heads.size == 7
