"""Contiguous ranges of a fixed number of token places, by first fit."""

from __future__ import annotations

import bisect


class Arena:
    """Hands out ranges of [0, size) and takes them back.

    Attributes:
        size: Places in all.
        free: Places in no range.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        # Gaps between ranges: ascending, never touching each other.
        self._starts = [0]
        self._lengths = [size]

    @property
    def largest(self) -> int:
        """Length of the longest range that can be had now."""
        return max(self._lengths, default=0)

    def allocate(self, length: int) -> int | None:
        """Return the start of a range of `length` places, None where no gap is that long."""
        for i, gap in enumerate(self._lengths):
            if gap >= length:
                start = self._starts[i]
                if gap == length:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i] += length
                    self._lengths[i] -= length
                self.free -= length
                return start
        return None

    def release(self, start: int, length: int) -> None:
        """Take back `length` places from `start`, all of one range or a part of it."""
        if length == 0:
            return
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._lengths.insert(at, length)
        self.free += length
        for left in (at, at - 1):
            if 0 <= left < len(self._starts) - 1 and self._starts[left] + self._lengths[left] == self._starts[left + 1]:
                self._lengths[left] += self._lengths.pop(left + 1)
                del self._starts[left + 1]
