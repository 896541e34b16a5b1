"""The books of the pool: what sessions own, what is kept of those that ended, and what is free."""

from __future__ import annotations

import random

import pytest

from services.common.engine.kv_memory import KvMemory, Lease
from services.common.engine.prefixes import BLOCK


def reserve(memory: KvMemory, length: int) -> Lease:
    lease = memory.reserve(length)
    assert lease is not None
    return lease


def fill(memory: KvMemory, lease: Lease, tokens: list[int], cached: int | None = None) -> None:
    """Do what a session's first request does."""
    lease.sequence.rebase(0, tokens)
    memory.publish(lease)
    lease.sequence.cached = len(tokens) if cached is None else cached


def keep(memory: KvMemory, tokens: list[int]) -> Lease:
    """Run a session that leaves these tokens."""
    lease = reserve(memory, len(tokens))
    fill(memory, lease, tokens)
    memory.release(lease)
    return lease


def test_what_is_cached_is_kept_and_the_rest_is_free() -> None:
    memory = KvMemory(100)
    lease = reserve(memory, 80)
    assert (memory.reserved, memory.kept, memory.sessions) == (80, 0, 1)
    fill(memory, lease, [1] * 60, cached=50)
    memory.release(lease)
    assert (memory.reserved, memory.kept, memory.sessions) == (0, 50, 0)
    assert memory.donor([1] * 60) == (lease, 50)
    assert memory.donor([1] * 40) == (lease, 40)
    assert memory.donor([2] * 60) is None
    # What it had not fed is no part of it any more.
    assert memory.sharing([1] * 60) == {lease: 50}
    # The rest is had without losing it.
    reserve(memory, 50)
    assert memory.kept == 50


def test_without_reuse_nothing_is_kept_or_found() -> None:
    memory = KvMemory(200, reuse=False)
    keep(memory, [1] * 60)
    assert (memory.reserved, memory.kept) == (0, 0)
    lease = reserve(memory, 80)
    fill(memory, lease, [1] * 60)
    assert memory.donor([1] * 60) is None
    assert memory.sharing([1] * 60) == {}


def test_less_than_a_block_is_not_kept() -> None:
    memory = KvMemory(100)
    keep(memory, [1] * (BLOCK - 1))
    assert memory.kept == 0
    keep(memory, [1] * BLOCK)
    assert memory.kept == BLOCK


def test_kept_prefixes_give_way_oldest_first_and_sessions_never() -> None:
    memory = KvMemory(120)
    keep(memory, [1] * 40)
    keep(memory, [2] * 40)
    assert memory.kept == 80
    session = reserve(memory, 40)
    # A prefix that is made use of is the last to go.
    assert memory.donor([1] * 40) is not None
    other = reserve(memory, 40)
    assert memory.donor([2] * 40) is None
    assert memory.donor([1] * 40) is not None
    third = reserve(memory, 40)
    assert memory.kept == 0
    assert sorted(lease.start for lease in (session, other, third)) == [0, 40, 80]


def test_no_kept_prefix_is_given_up_where_that_is_not_enough() -> None:
    memory = KvMemory(120)
    first, second = reserve(memory, 40), reserve(memory, 40)
    fill(memory, first, [1] * 40)
    memory.release(first)
    assert memory.reserve(41) is None, "40 places before the session, 40 after it"
    assert memory.kept == 40
    assert memory.donor([1] * 40) == (first, 40)
    memory.release(second)
    assert reserve(memory, 81).start == 0
    assert memory.kept == 0


def test_what_another_holds_is_not_kept_twice() -> None:
    memory = KvMemory(500)
    keep(memory, [1] * 60)
    keep(memory, [1] * 60)
    keep(memory, [1] * 50)
    assert memory.kept == 60
    # A session that goes on with it holds it too.
    live = reserve(memory, 100)
    fill(memory, live, [1] * 60 + [2] * 40)
    keep(memory, [1] * 60 + [2] * 10)
    assert memory.kept == 60


def test_a_longer_one_takes_the_place_of_those_it_contains() -> None:
    memory = KvMemory(500)
    keep(memory, [1] * 60)
    keep(memory, [1] * 50 + [2] * 20)
    assert memory.kept == 130
    longest = keep(memory, [1] * 90)
    assert memory.kept == 70 + 90
    assert memory.donor([1] * 90) == (longest, 90)


def test_what_a_live_session_has_not_fed_yet_does_not_count_as_held() -> None:
    memory = KvMemory(500)
    live = reserve(memory, 100)
    fill(memory, live, [1] * 100, cached=10)
    lease = keep(memory, [1] * 60)
    assert memory.kept == 60
    assert memory.donor([1] * 100) == (lease, 60)


def test_no_length_overlaps_when_kept_ones_are_cut_to_what_they_hold() -> None:
    memory = KvMemory(100)
    lease = reserve(memory, 100)
    fill(memory, lease, [1] * 40)
    memory.release(lease)
    assert (lease.start, lease.length) == (0, 40)
    assert reserve(memory, 60).start == 40


@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance_on_a_random_walk(seed: int) -> None:
    source = random.Random(seed)
    memory = KvMemory(600)
    live: list[Lease] = []
    kept: list[Lease] = []
    beginnings = [[i] * 120 for i in range(4)]
    for _ in range(600):
        length, gaps = source.randrange(1, 200), [0, memory.size]
        for lease in sorted(live, key=lambda lease: lease.start):
            gaps[-1:] = [lease.start, lease.start + lease.length, memory.size]
        room = max(end - start for start, end in zip(gaps[::2], gaps[1::2], strict=True))
        if source.random() < 0.5:
            lease = memory.reserve(length)
            assert (lease is not None) == (room >= length), "whatever the sessions leave can be had"
        else:
            lease = None
        if lease is not None:
            text = (source.choice(beginnings)[: source.randrange(120)] + [9] * 200)[: lease.length]
            fill(memory, lease, text, source.randrange(len(text) + 1))
            live.append(lease)
        elif live:
            lease = live.pop(source.randrange(len(live)))
            memory.release(lease)
            kept.append(lease)
        if source.random() < 0.3:
            memory.donor(source.choice(beginnings))
        kept = [lease for lease in kept if lease in memory.sharing(lease.tokens)]
        owned = [False] * memory.size
        for lease in live + kept:
            places = slice(lease.start, lease.start + lease.length)
            assert not any(owned[places]), "two leases at one place"
            owned[places] = [True] * lease.length
        assert memory.reserved == sum(lease.length for lease in live)
        assert memory.kept == sum(lease.length for lease in kept)
        assert memory.sessions == len(live)
    for lease in live:
        memory.release(lease)
    assert (memory.reserved, memory.sessions) == (0, 0)
    assert reserve(memory, memory.size).start == 0, "all of it can be had again"
    assert memory.kept == 0
