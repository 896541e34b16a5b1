"""Ranges of places: never two at one place, and what is given back becomes one gap again."""

from __future__ import annotations

import random

import pytest

from services.common.engine.arena import Arena


class NaiveArena:
    """One flag a place."""

    def __init__(self, size: int) -> None:
        self.taken = [False] * size

    def gaps(self) -> list[int]:
        """Return the lengths of the runs of free places, in order."""
        text = "".join("x" if taken else "." for taken in self.taken)
        return [len(run) for run in text.split("x") if run]

    def mark(self, start: int, length: int, taken: bool) -> None:
        """Take places that are free, or free places that are taken."""
        assert self.taken[start : start + length] == [not taken] * length
        self.taken[start : start + length] = [taken] * length


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_equals_a_naive_model(seed: int) -> None:
    source = random.Random(seed)
    arena, naive = Arena(100), NaiveArena(100)
    ranges: list[tuple[int, int]] = []
    for _ in range(1000):
        if source.random() < 0.55:
            length = source.randrange(1, 25)
            start = arena.allocate(length)
            assert (start is None) == (max(naive.gaps(), default=0) < length), "whatever fits in a gap is granted"
            if start is not None:
                naive.mark(start, length, taken=True)
                ranges.append((start, length))
        elif ranges:
            start, length = ranges.pop(source.randrange(len(ranges)))
            # Some ranges are given back in two parts, the end first: what a kept prefix leaves.
            kept = source.randrange(length + 1)
            for part_start, part_length in ((start + kept, length - kept), (start, kept)):
                arena.release(part_start, part_length)
                naive.mark(part_start, part_length, taken=False)
        assert arena.free == sum(naive.gaps())
        assert arena.largest == max(naive.gaps(), default=0)
    for start, length in ranges:
        arena.release(start, length)
    assert arena.allocate(100) == 0, "all gaps have become one"


def test_the_first_gap_that_is_long_enough_is_taken() -> None:
    arena = Arena(10)
    assert [arena.allocate(2) for _ in range(5)] == [0, 2, 4, 6, 8]
    assert arena.allocate(1) is None
    assert arena.largest == 0
    arena.release(2, 2)
    arena.release(6, 2)
    assert arena.allocate(3) is None, "4 places are free, but no 3 next to each other"
    arena.release(4, 2)
    assert arena.allocate(3) == 2
    assert (arena.free, arena.largest) == (3, 3)
