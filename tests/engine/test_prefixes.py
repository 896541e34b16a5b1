"""Who has what beginning of a text in its cache."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from services.common.engine.prefixes import BLOCK, PrefixIndex, common_length


@dataclass(eq=False)
class Cache:
    tokens: list[int]
    cached: int


def naive_common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_the_common_length_is_that_of_a_naive_comparison() -> None:
    source = random.Random(1)
    text = [source.randrange(9) for _ in range(400)]
    for length in (*range(70), 127, 128, 129, 400):
        for place in range(length):
            other = text[:length]
            other[place] += 1
            assert common_length(text, other) == common_length(other, text) == place
        assert common_length(text, text[:length]) == common_length(text[:length], text) == length
    for _ in range(500):
        a, b = ([source.randrange(2) for _ in range(source.randrange(12))] for _ in range(2))
        assert common_length(a, b) == naive_common_length(a, b)


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_is_that_of_a_naive_search(seed: int) -> None:
    source = random.Random(seed)
    index: PrefixIndex[Cache] = PrefixIndex()
    holders: list[Cache] = []
    beginnings = [[source.randrange(9) for _ in range(200)] for _ in range(3)]

    def text() -> list[int]:
        shared = source.choice(beginnings)[: source.randrange(200)]
        return shared + [source.randrange(9) for _ in range(source.randrange(60))]

    for _ in range(300):
        if source.random() < 0.6:
            tokens = text()
            holders.append(Cache(tokens, source.randrange(len(tokens) + 1)))
            index.add(holders[-1])
        elif holders:
            index.remove(holders.pop(source.randrange(len(holders))))
        wanted = text()
        lengths = [min(holder.cached, naive_common_length(holder.tokens, wanted)) for holder in holders]
        best = max(lengths, default=0)
        found = index.longest(wanted)
        if best < BLOCK:
            assert found is None
        else:
            assert found is not None
            assert found[1] == best
            assert lengths[holders.index(found[0])] == best
        shares = {id(holder): naive_common_length(holder.tokens, wanted) for holder in holders}
        assert {id(holder): common for holder, common in index.sharing(wanted)} == {
            holder: common for holder, common in shares.items() if common >= BLOCK
        }


def test_a_holder_is_found_by_what_it_holds_when_it_is_added_again() -> None:
    index: PrefixIndex[Cache] = PrefixIndex()
    cache = Cache([1] * BLOCK, BLOCK)
    for _ in range(2):
        index.add(cache)
    assert [found for found, _ in index.sharing([1] * 40)] == [cache]
    cache.tokens[0] = 2
    index.add(cache)
    assert index.longest([1] * 40) is None
    assert index.longest([2, *[1] * 40]) == (cache, BLOCK)
    # Cut back to less than a block, it is found no more.
    del cache.tokens[5:]
    index.add(cache)
    assert list(index.sharing([2, *[1] * 40])) == []
    index.remove(cache)
    index.remove(cache)


def test_tokens_that_are_still_to_be_cached_are_shared_but_not_had() -> None:
    index: PrefixIndex[Cache] = PrefixIndex()
    ahead = Cache([5] * 100, 0)
    index.add(ahead)
    assert index.longest([5] * 100) is None
    assert list(index.sharing([5] * 70)) == [(ahead, 70)]
    ahead.cached = 60
    assert index.longest([5] * 100) == (ahead, 60)
