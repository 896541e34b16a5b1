"""Whether drafting runs ahead while the target verifies.

It saves the next round's drafting where everything is kept, and costs where draft and target share a machine, or where
the draft has to leave what it was doing. Tokens a round are the same with it and without it, so the two are compared by
the time from one Verify to the next: measured, and for all requests of the service together, since what one request's
drafting costs may fall on the others.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

log = logging.getLogger(__name__)

OverlapMode: TypeAlias = Literal["auto", "on", "off"]

# Cycles of a trial: their mean is then known to some 3% where everything is kept in about half of them.
_TRIAL: Final = 48
# The better way is kept for this many trials before the other is tried again, twice as many each time it has won.
_REST_FIRST, _REST_MOST = 2, 32
# Cycles that a mean remembers, and what the mean of an earlier trial counts for when the next one begins.
_MEMORY: Final = 128
_CARRIED: Final = 8
# A cycle with a stall in it counts as no more than so many means.
_CLIP: Final = 2.0
# Running ahead is extra work: it has to be worth it.
_LEAST_GAIN: Final = 0.02
# A trial ends early, after so many cycles at least, where its way is slower by so many standard errors: on two cores
# that draft and target share, running ahead makes a round a fifth longer, which needs no 48 cycles to be seen.
_TRIAL_LEAST: Final = 8
_CLEAR: Final = 3.0


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle's part in the comparison: from a round's Verify to the next round's.

    Attributes:
        runs_ahead: Drafting goes on meanwhile.
        trial: Which trial it belongs to.
    """

    runs_ahead: bool
    trial: int


class OverlapPolicy(Protocol):
    """Decides, cycle by cycle; from the clock alone, never from a draft."""

    def begin(self) -> Cycle:
        """Begin a cycle in which drafting could run ahead."""

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn what a cycle took."""


class FixedOverlap:
    """Always the same."""

    def __init__(self, runs_ahead: bool) -> None:
        self._cycle = Cycle(runs_ahead, 0)

    def begin(self) -> Cycle:
        """Begin a cycle."""
        return self._cycle

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn nothing."""


class MeasuredOverlap:
    """What takes less time, found by trying both in turn; the worse of them ever more rarely."""

    def __init__(self) -> None:
        self._means = {False: _Mean(), True: _Mean()}
        self._runs_ahead = False
        self._is_better = False
        self._trial = 0
        self._left, self._ended = _TRIAL, 0
        self._rest = _REST_FIRST
        self._is_rest = False

    def begin(self) -> Cycle:
        """Begin a cycle."""
        if self._left == 0:
            self._next_trial()
        self._left -= 1
        return Cycle(self._runs_ahead, self._trial)

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn what a cycle took; one that lies across two trials tells nothing of either."""
        if cycle.trial != self._trial:
            return
        tried, other = self._means[cycle.runs_ahead], self._means[not cycle.runs_ahead]
        tried.add(spent_s)
        self._ended += 1
        if not self._is_rest and self._ended >= _TRIAL_LEAST and tried.is_clearly_above(other):
            self._left = 0

    def _next_trial(self) -> None:
        self._trial += 1
        self._ended = 0
        if self._is_rest or not self._means[not self._runs_ahead].count:
            self._runs_ahead = not self._runs_ahead
            self._left, self._is_rest = _TRIAL, False
            self._means[self._runs_ahead].carry()
            return
        ahead, alone = self._means[True].value, self._means[False].value
        is_better = ahead < (1 - _LEAST_GAIN) * alone
        self._rest = min(2 * self._rest, _REST_MOST) if is_better == self._is_better else _REST_FIRST
        if is_better != self._is_better:
            said = "runs ahead" if is_better else "waits for its round"
            log.info("drafting %s: a round takes %.2f ms ahead, %.2f ms else", said, ahead * 1e3, alone * 1e3)
        self._is_better = self._runs_ahead = is_better
        self._left, self._is_rest = _TRIAL * self._rest, True


def overlap_policy(mode: OverlapMode) -> OverlapPolicy:
    """Return the policy of a service, for those requests whose tokens may depend on the clock."""
    return MeasuredOverlap() if mode == "auto" else FixedOverlap(mode == "on")


class _Mean:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0
        self._variance = 0.0

    def add(self, value: float) -> None:
        if self.count >= _CARRIED:
            value = min(value, _CLIP * self.value)
        self.count = min(self.count + 1, _MEMORY)
        off = value - self.value
        self.value += off / self.count
        self._variance += (off * (value - self.value) - self._variance) / self.count

    def carry(self) -> None:
        """Let what is known count for little beside what comes."""
        self.count = min(self.count, _CARRIED)

    def is_clearly_above(self, other: _Mean) -> bool:
        """Tell whether it is higher, by more than chance makes likely."""
        if min(self.count, other.count) < _TRIAL_LEAST:
            return False
        squared_error = self._variance / self.count + other._variance / other.count
        return self.value - other.value > _CLEAR * math.sqrt(squared_error)
