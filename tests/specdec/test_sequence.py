"""A worker's copy of the sequence, and what has to be fed to the model."""

from __future__ import annotations

import pytest

from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.sequence import CachedSequence


def sequence(tokens: list[int], cached: int) -> CachedSequence:
    made = CachedSequence()
    made.rebase(0, tokens)
    made.cached = cached
    return made


def test_starts_empty() -> None:
    assert (CachedSequence().tokens, CachedSequence().cached) == ([], 0)


def test_rebase_keeps_crops_and_appends() -> None:
    s = sequence([1, 2, 3, 4], cached=4)
    s.rebase(2, [9, 8])
    assert (s.tokens, s.cached) == ([1, 2, 9, 8], 2)
    s.rebase(4, [7])
    assert (s.tokens, s.cached) == ([1, 2, 9, 8, 7], 2)
    s.rebase(3, [])
    assert (s.tokens, s.cached) == ([1, 2, 9], 2)


def test_a_repeated_request_has_the_same_answer() -> None:
    s = sequence([1, 2, 3], cached=3)
    s.rebase(3, [4, 5])
    once = list(s.tokens)
    s.cached = 5
    s.rebase(3, [4, 5])
    assert s.tokens == once
    assert s.pending() == [4, 5]


def test_a_gap_is_refused_and_changes_nothing() -> None:
    s = sequence([1, 2], cached=1)
    with pytest.raises(UnknownPrefixError) as caught:
        s.rebase(3, [4])
    assert caught.value.known_length == 2
    assert (s.tokens, s.cached) == ([1, 2], 1)
    with pytest.raises(UnknownPrefixError):
        CachedSequence().rebase(1, [])


@pytest.mark.parametrize(
    ("cached", "at_least", "fed", "kept"),
    [
        (0, 1, [1, 2, 3, 4], 0),
        (2, 1, [3, 4], 2),
        (2, 2, [3, 4], 2),
        (2, 3, [2, 3, 4], 1),  # rows are wanted for tokens that are cached already
        (4, 1, [4], 3),
        (4, 9, [1, 2, 3, 4], 0),
    ],
)
def test_pending(cached: int, at_least: int, fed: list[int], kept: int) -> None:
    s = sequence([1, 2, 3, 4], cached)
    assert s.pending(at_least) == fed
    assert s.cached == kept
