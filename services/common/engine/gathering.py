"""Whether the next pass waits for sessions that are about to come back.

A pass over one position takes nearly as long as one over ten: most of it is spent once however many sessions share it.
Sessions that come back a moment after a pass has begun have to wait for its end, and the others for theirs: two groups
that take turns, and two passes where one would do. Waiting costs those who wait the time until the others are
back, and saves the others the part of a pass that is spent once, so it pays where

    wait x those who wait  <  spent once x those who come

For two groups of one size that is T(A) + T(B) > wait + T(A + B), with T(n) = spent once + n x a position. One session
that is far away does not hold up the many that are near.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

# Share by which an average follows a measurement, as round-trip times are followed (Jacobson 1988).
_GAIN: Final = 0.25
# Of its deviations: how much later than usual a session may be and still be waited for.
_PATIENCE: Final = 2.0
# In times of what is spent once: past that a session is away, however long. So one long pause is soon forgotten.
_AWAY: Final = 4.0


@dataclass(frozen=True, slots=True)
class PassShape:
    """How the time of a pass grows with its positions, as it was measured at start.

    Attributes:
        once_s: Seconds that are spent once.
        position_s: Seconds for each position.
    """

    once_s: float
    position_s: float

    def share_once(self, positions: int) -> float:
        """Return which share of a pass over so many positions is spent once: 0 to 1."""
        return self.once_s / (self.once_s + positions * self.position_s)


@dataclass(slots=True)
class _Return:
    """How long a session takes to come back from a pass.

    Attributes:
        left_s: When it left the last one.
        is_away: It has not asked for the next.
        mean_s: How long it was away, as of late; None until that is known.
        deviation_s: By how much that differs.
    """

    left_s: float
    is_away: bool = True
    mean_s: float | None = None
    deviation_s: float = 0.0

    @property
    def due_s(self) -> float:
        """When it is back, if it comes at all: a session may have ended, or its client have paused."""
        assert self.mean_s is not None
        return self.left_s + self.mean_s + _PATIENCE * self.deviation_s

    def came(self, away_s: float) -> None:
        self.is_away = False
        if self.mean_s is None:
            self.mean_s, self.deviation_s = away_s, away_s / 2
        else:
            self.deviation_s += _GAIN * (abs(away_s - self.mean_s) - self.deviation_s)
            self.mean_s += _GAIN * (away_s - self.mean_s)


class Gathering:
    """Knows which sessions are away between two passes, and for how long. All times are of one clock, in seconds."""

    def __init__(self, shape: PassShape) -> None:
        self._shape = shape
        self._returns: dict[Hashable, _Return] = {}
        self._once_s = shape.once_s
        self._since_s: float | None = None

    def passed(self, positions: int, seconds: float) -> None:
        """Learn what is spent once from a pass that is over."""
        self._once_s += _GAIN * (seconds * self._shape.share_once(positions) - self._once_s)
        self._since_s = None

    def left(self, session: Hashable, now_s: float) -> None:
        """Note that a session has what it asked for, and will ask again."""
        known = self._returns.setdefault(session, _Return(now_s))
        known.left_s, known.is_away = now_s, True

    def came(self, session: Hashable, now_s: float) -> None:
        """Note that a session asks for a pass."""
        known = self._returns.get(session)
        if known is not None and known.is_away:
            known.came(min(now_s - known.left_s, _AWAY * self._once_s))

    def ended(self, session: Hashable) -> None:
        """Expect a session no more."""
        self._returns.pop(session, None)

    def wait_s(self, now_s: float, waiting: int) -> float:
        """Return how long the next pass had better wait, 0 where it had better begin.

        Args:
            now_s: The time.
            waiting: How many sessions wait for the pass, at least one.
        """
        if self._since_s is None:
            self._since_s = now_s
        latest_s = self._since_s + self._once_s
        coming = sorted(
            known.due_s - now_s
            for known in self._returns.values()
            if known.is_away and known.mean_s is not None and known.mean_s <= self._once_s
            if now_s < known.due_s <= latest_s
        )
        pays = (due_s for i, due_s in enumerate(coming) if due_s * waiting < self._once_s * (i + 1))
        return max(pays, default=0.0)
