"""A worker's copy of the sequence, and what has to be fed to the model."""

from __future__ import annotations

import random

import pytest

from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.sequence import CachedSequence, RemoteSequence


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


class TestRemoteSequence:
    def test_sends_the_prompt_once_and_then_only_what_is_new(self) -> None:
        remote = RemoteSequence()
        assert remote.plan([1, 2, 3], [7, 8]) == (0, [1, 2, 3, 7, 8])
        # 7 kept, 8 rejected for 5; the next drafts are 6, 6.
        assert remote.plan([1, 2, 3, 7, 5], [6, 6]) == (4, [5, 6, 6])
        # Both kept, and a bonus.
        assert remote.plan([1, 2, 3, 7, 5, 6, 6, 9], []) == (7, [9])

    def test_counts_the_drafts_that_the_worker_made_itself(self) -> None:
        remote = RemoteSequence()
        assert remote.plan([1, 2]) == (0, [1, 2])
        remote.append(3)
        remote.append(4)
        assert remote.plan([1, 2, 3, 9]) == (3, [9])

    def test_a_worker_that_drafts_on_from_its_own_drafts_is_sent_the_last_of_them(self) -> None:
        remote = RemoteSequence()
        remote.plan([1, 2])
        for token in (3, 4):
            remote.append(token)
        assert remote.plan([1, 2], [3, 4]) == (3, [4])
        for token in (5, 6):
            remote.append(token)
        # 3 kept, 4 rejected for 9.
        assert remote.plan([1, 2, 3, 9]) == (3, [9])

    def test_goes_on_from_drafts_that_ran_ahead_and_were_kept(self) -> None:
        remote = RemoteSequence()
        remote.plan([1, 2], [3, 4])
        for token in (5, 6):
            remote.append(token)
        assert remote.plan([1, 2, 3, 4, 5], [6]) == (5, [6])

    def test_sends_again_what_has_to_be_fed_again(self) -> None:
        remote = RemoteSequence()
        remote.plan([1, 2, 3], [4])
        assert remote.plan([1, 2, 3], [4], feed_at_least=2) == (2, [3, 4])
        assert remote.plan([1, 2, 3], [4], feed_at_least=4) == (0, [1, 2, 3, 4])

    def test_starts_where_a_worker_that_forgot_says(self) -> None:
        remote = RemoteSequence()
        remote.plan([1, 2, 3, 4])
        remote.forget(1)
        assert remote.plan([1, 2, 3, 4, 5]) == (1, [2, 3, 4, 5])
        remote.forget(9)  # it never knows more than it was sent
        assert remote.plan([1, 2, 3, 4, 5, 6]) == (5, [6])


def test_the_two_copies_agree_whatever_happens() -> None:
    """Rounds of random outcomes, lost memory and crops: the worker's copy is the text and its drafts, every time."""
    rng = random.Random(5)
    for _ in range(200):
        remote, worker, committed = RemoteSequence(), CachedSequence(), [1, 2]
        for _ in range(12):
            drafts = [rng.randrange(3) for _ in range(rng.randrange(4))]
            base, tokens = remote.plan(committed, drafts, feed_at_least=len(drafts) + 1)
            if base > len(worker.tokens):
                remote.forget(len(worker.tokens))
                base, tokens = remote.plan(committed, drafts, feed_at_least=len(drafts) + 1)
            worker.rebase(base, tokens)
            assert worker.tokens == [*committed, *drafts]
            assert len(tokens) > len(drafts)
            kept = rng.randrange(len(drafts) + 1)
            committed += [*drafts[:kept], rng.randrange(3)]
            if rng.random() < 0.1:
                worker = CachedSequence()
            elif rng.random() < 0.1:
                worker.rebase(rng.randrange(len(worker.tokens)), [])
