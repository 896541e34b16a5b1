"""Who holds the keys and values of which prefix: found by the hash of its first block, then compared token by token."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

BLOCK = 32
"""Tokens that a prefix has at the least; shorter ones are not worth a copy."""


class Holder(Protocol):
    """Token places whose first `cached` are the keys and values of the first `cached` of `tokens`."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens, cached or not."""

    @property
    def cached(self) -> int:
        """How many of them have been through the model."""


H = TypeVar("H", bound=Holder)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    limit = min(len(a), len(b))
    equal, step = 0, BLOCK
    # Slices are compared in C; the step doubles while they agree and halves when they do not.
    while step:
        end = min(equal + step, limit)
        if end > equal and a[equal:end] == b[equal:end]:
            equal, step = end, 2 * step
        else:
            step //= 2
    return equal


class PrefixIndex(Generic[H]):
    """Holders by the hash of their first block."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, ...], list[H]] = {}
        self._keys: dict[int, tuple[int, ...]] = {}

    def add(self, holder: H) -> None:
        """Note a holder; one of less than a block is not noted. Added again, it is found by what it holds now."""
        key = tuple(holder.tokens[:BLOCK])
        if self._keys.get(id(holder)) == key:
            return
        self.remove(holder)
        if len(key) == BLOCK:
            self._holders.setdefault(key, []).append(holder)
            self._keys[id(holder)] = key

    def remove(self, holder: H) -> None:
        """Forget a holder, noted or not."""
        key = self._keys.pop(id(holder), None)
        if key is not None:
            self._holders[key].remove(holder)
            if not self._holders[key]:
                del self._holders[key]

    def sharing(self, tokens: Sequence[int], among: Container[H] | None = None) -> Iterator[tuple[H, int]]:
        """Yield the holders whose tokens begin like these, newest first, and how many are common, cached or not.

        Args:
            tokens: The beginning.
            among: Only these are looked at.
        """
        for holder in self._alike(tokens):
            if among is None or holder in among:
                yield holder, common_length(holder.tokens, tokens)

    def longest(self, tokens: Sequence[int]) -> tuple[H, int] | None:
        """Return the holder with the most of the beginning of `tokens` in its cache, and how much that is."""
        best: tuple[H, int] | None = None
        for holder in self._alike(tokens):
            # Long prefixes take a while to compare, and of many that have one in common most have nothing to add.
            if holder.cached <= (best[1] if best else BLOCK - 1):
                continue
            length = min(common_length(holder.tokens, tokens), holder.cached)
            if best is None or length > best[1]:
                best = holder, length
        return best

    def _alike(self, tokens: Sequence[int]) -> Iterable[H]:
        """Return the holders with the same first block, newest first."""
        return reversed(self._holders.get(tuple(tokens[:BLOCK]), ()))
