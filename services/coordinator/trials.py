"""Which of two ways of doing things takes less time, found by trying both in turn; the worse of them ever more rarely.

Measured, and for all requests of the service together, since what one request does may cost the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

# The better way is kept for this many trials before the other is tried again, twice as many each time it has won, and
# four times as many where that was clear.
_REST_FIRST, _REST_MOST = 2, 32
# Turns that a mean remembers, and what the mean of an earlier trial counts for when the next one begins.
_MEMORY: Final = 128
_CARRIED: Final = 8
# A turn with a stall in it counts as no more than so many means.
_CLIP: Final = 2.0
# The other way has to be worth the change, and its gain no accident: so many standard errors. From it to the usual way
# a change needs no such proof.
_LEAST_GAIN: Final = 0.02
_LIKELY: Final = 1.0
# A trial ends early, after so many turns at least, where its way is slower by so many standard errors: on two cores
# that draft and target share, running ahead makes a round a fifth longer, which needs no whole trial to be seen.
_TRIAL_LEAST: Final = 8
_CLEAR: Final = 3.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A part in the comparison.

    Attributes:
        other: It goes the other way.
        trial: Which trial it belongs to.
    """

    other: bool
    trial: int


class Trials:
    """Compares the usual way with another by the time that a unit of work takes."""

    def __init__(self, turns: int, on_change: Callable[[bool, float, float], None], alike: int = 1) -> None:
        """Begin with the usual way.

        Args:
            turns: Of a trial.
            on_change: Told when another way is found to be the better one: whether it is the other; seconds of a unit
                the other way, and the usual.
            alike: Turns that share their fate, as those of sessions in one pass do: so many of them count as one.
        """
        self._on_change = on_change
        self._turns = turns * alike
        self._alike = alike
        self._means = {False: _Mean(_MEMORY * alike), True: _Mean(_MEMORY * alike)}
        self._other = False
        self._is_better = False
        self._trial = 0
        self._left, self._ended = self._turns, 0
        self._rest = _REST_FIRST
        self._is_rest = False

    @property
    def usual_s(self) -> float | None:
        """Seconds of a unit the usual way; None where that is not known."""
        usual = self._means[False]
        return usual.value if usual.count else None

    def begin(self) -> Turn:
        """Begin a turn."""
        if self._left <= 0:
            self._next_trial()
        self._left -= 1
        return Turn(self._other, self._trial)

    def end(self, turn: Turn, spent_s: float, units: float = 1.0) -> None:
        """Learn what a turn took, for so much work; one that lies across two trials tells nothing of either."""
        if turn.trial != self._trial:
            return
        tried, unlike = self._means[turn.other], self._means[not turn.other]
        tried.add(spent_s, units)
        self._ended += 1
        if (
            not self._is_rest
            and self._ended >= _TRIAL_LEAST * self._alike
            and tried.is_above(unlike, _CLEAR, self._alike)
        ):
            self._left = 0

    def _next_trial(self) -> None:
        self._trial += 1
        self._ended = 0
        if self._is_rest or not all(mean.count for mean in self._means.values()):
            self._other = not self._other
            self._left, self._is_rest = self._turns, False
            self._means[self._other].carry(_CARRIED * self._alike)
            return
        other, usual = self._means[True], self._means[False]
        other_s, usual_s = other.value, usual.value
        is_better = other_s < (1 - _LEAST_GAIN) * usual_s and (
            self._is_better or usual.is_above(other, _LIKELY, self._alike)
        )
        better, worse = (other, usual) if is_better else (usual, other)
        longer = 4 if worse.is_above(better, _CLEAR, self._alike) else 2
        self._rest = min(longer * self._rest, _REST_MOST) if is_better == self._is_better else _REST_FIRST
        if is_better != self._is_better:
            self._on_change(is_better, other_s, usual_s)
        self._is_better = self._other = is_better
        self._left, self._is_rest = self._turns * self._rest, True


class _Mean:
    """Seconds of a unit of work, as a ratio of sums that forget."""

    def __init__(self, memory: float) -> None:
        self.count = 0.0
        self._memory = memory
        self._seconds = self._units = self._squares = 0.0

    @property
    def value(self) -> float:
        return self._seconds / self._units if self._units else 0.0

    def add(self, seconds: float, units: float) -> None:
        if self.count >= _CARRIED:
            seconds = min(seconds, _CLIP * self._seconds / self.count)
        if self.count >= self._memory:
            self._fade(1 - 1 / self._memory)
        before = seconds - self.value * units
        self.count += 1
        self._seconds += seconds
        self._units += units
        self._squares += before * (seconds - self.value * units)

    def carry(self, count: float) -> None:
        """Let what is known count for little beside what comes."""
        if self.count > count:
            self._fade(count / self.count)
            self.count = count

    def is_above(self, other: _Mean, errors: float, alike: int) -> bool:
        """Tell whether it is higher by more than so many standard errors."""
        if min(self.count, other.count) < _TRIAL_LEAST * alike:
            return False
        squared_error = alike * (self._squared_error() + other._squared_error())
        return self.value - other.value > errors * math.sqrt(max(0.0, squared_error))

    def _squared_error(self) -> float:
        return self._squares / (self._units * self._units)

    def _fade(self, by: float) -> None:
        self.count *= by
        self._seconds *= by
        self._units *= by
        self._squares *= by
