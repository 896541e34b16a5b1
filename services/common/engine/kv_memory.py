"""Who owns which places of the KV pool: ranges reserved by sessions, and prefixes kept for the sessions to come."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from services.common.engine.arena import Arena
from services.common.engine.prefixes import BLOCK, PrefixIndex
from services.common.specdec.sequence import CachedSequence


@dataclass(eq=False, slots=True)
class Lease:
    """A range of places, and the sequence whose keys and values lie in it: position i at place `start + i`.

    Attributes:
        start: First place.
        length: Places, the longest that the sequence can become.
        sequence: Its tokens, and how many of them are cached.
        live: A session owns it; else it is a kept prefix, which goes when its places are needed.
        stated: Of a draft that is fed with the target's states: the first positions before which a state is known, the
            target's or its own. Before the first token there is none to know.
    """

    start: int
    length: int
    sequence: CachedSequence = field(default_factory=CachedSequence)
    live: bool = True
    stated: int = 1

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens, cached or not."""
        return self.sequence.tokens

    @property
    def cached(self) -> int:
        """How many of them have been through the model."""
        return self.sequence.cached


class KvMemory:
    """The ranges of a pool. What sessions have reserved is never taken from them; kept prefixes give way, oldest first.

    Attributes:
        size: Places in all.
        reserved: Places that sessions own.
    """

    def __init__(self, size: int, *, reuse: bool = True) -> None:
        """Take `size` places; without `reuse` no session finds what another holds, and nothing is kept."""
        self.size = size
        self._reuse = reuse
        self.reserved = 0
        self._live: set[Lease] = set()
        self._arena = Arena(size)
        self._index: PrefixIndex[Lease] = PrefixIndex()
        # In order of use; the values mean nothing.
        self._kept: dict[Lease, None] = {}

    @property
    def sessions(self) -> int:
        """Leases that sessions own."""
        return len(self._live)

    @property
    def kept(self) -> int:
        """Places that hold prefixes of sessions that have ended."""
        return self.size - self._arena.free - self.reserved

    def reserve(self, length: int) -> Lease | None:
        """Return a range of `length` places, None while the sessions leave no gap of that length."""
        if self._arena.largest < length and self._room() < length:
            # No kept prefix is given up for nothing.
            return None
        while (start := self._arena.allocate(length)) is None:
            self._drop(next(iter(self._kept)))
        lease = Lease(start, length)
        self._live.add(lease)
        self.reserved += length
        return lease

    def release(self, lease: Lease) -> None:
        """End a session's ownership; what is cached is kept for sessions that begin the same way."""
        lease.live = False
        self._live.remove(lease)
        self.reserved -= lease.length
        self._index.remove(lease)
        del lease.sequence.tokens[lease.cached :]
        if not self._reuse or lease.cached < BLOCK or self._held_elsewhere(lease):
            self._arena.release(lease.start, lease.length)
            return
        self._arena.release(lease.start + lease.cached, lease.length - lease.cached)
        lease.length = lease.cached
        self._kept[lease] = None
        self._index.add(lease)

    def publish(self, lease: Lease) -> None:
        """Let other sessions find this one by its tokens, those still to be cached included."""
        if self._reuse:
            self._index.add(lease)

    def donor(self, tokens: Sequence[int]) -> tuple[Lease, int] | None:
        """Return who holds the longest beginning of `tokens`, and how much of it; a kept one is then the last to go."""
        found = self._index.longest(tokens)
        if found is not None and not found[0].live:
            self._kept[found[0]] = self._kept.pop(found[0])
        return found

    def sharing(self, tokens: Sequence[int], among: Container[Lease] | None = None) -> dict[Lease, int]:
        """Return all, or those of `among`, whose tokens, cached or not, begin like these, and how many are common."""
        return dict(self._index.sharing(tokens, among))

    def _room(self) -> int:
        """Return the longest range that the sessions leave, kept prefixes or not."""
        room, end = 0, 0
        for lease in sorted(self._live, key=lambda lease: lease.start):
            room, end = max(room, lease.start - end), lease.start + lease.length
        return max(room, self.size - end)

    def _held_elsewhere(self, lease: Lease) -> bool:
        """Tell whether another lease holds all of this one; drop kept ones of which this one holds all."""
        for other, common in list(self._index.sharing(lease.tokens)):
            if min(common, other.cached) == lease.cached:
                return True
            if not other.live and common == other.cached:
                self._drop(other)
        return False

    def _drop(self, lease: Lease) -> None:
        del self._kept[lease]
        self._index.remove(lease)
        self._arena.release(lease.start, lease.length)
