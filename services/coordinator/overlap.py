"""Whether drafting runs ahead while the target verifies.

It saves the next round's drafting where everything is kept, and costs where draft and target share a machine, or where
the draft has to leave what it was doing. Tokens a round are the same with it and without it, so the two are compared by
the time from one Verify to the next: measured, and for all requests of the service together, since what one request's
drafting costs may fall on the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, TypeAlias

from services.coordinator.trials import Trials, Turn

log = logging.getLogger(__name__)

OverlapMode: TypeAlias = Literal["auto", "on", "off"]

# Cycles of a trial: their mean is then known to some 3% where everything is kept in about half of them. Where several
# requests run, at least so many of each.
_TRIAL: Final = 48
_TRIAL_OF_EACH: Final = 16


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle's part in the comparison: from a round's Verify to the next round's.

    Attributes:
        runs_ahead: Drafting goes on meanwhile.
        trials: Where it is compared; None where it is not,
        turn: and as what.
    """

    runs_ahead: bool
    trials: Trials | None = None
    turn: Turn | None = None


class OverlapPolicy(Protocol):
    """Decides, cycle by cycle; from the clock alone, never from a draft."""

    def begin(self) -> Cycle:
        """Begin a cycle in which drafting could run ahead."""

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn what a cycle took."""


class FixedOverlap:
    """Always the same."""

    def __init__(self, runs_ahead: bool) -> None:
        self._cycle = Cycle(runs_ahead)

    def begin(self) -> Cycle:
        """Begin a cycle."""
        return self._cycle

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn nothing."""


class MeasuredOverlap:
    """What takes less time, found by trying both in turn; at each load anew."""

    def __init__(self, running: Callable[[], int] = lambda: 1) -> None:
        """Know nothing.

        Args:
            running: Tells how many requests are running.
        """
        self._running = running
        # By powers of two of the requests that run.
        self._trials: dict[int, Trials] = {}

    def begin(self) -> Cycle:
        """Begin a cycle."""
        load = max(1, self._running()).bit_length()
        if load not in self._trials:
            # Cycles of requests that share passes meet with the same accidents.
            alike = 2 ** (load - 1)
            self._trials[load] = Trials(max(_TRIAL // alike, _TRIAL_OF_EACH), partial(_tell, alike), alike)
        trials = self._trials[load]
        turn = trials.begin()
        return Cycle(turn.other, trials, turn)

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn what a cycle took."""
        if cycle.trials is not None and cycle.turn is not None:
            cycle.trials.end(cycle.turn, spent_s)


def overlap_policy(mode: OverlapMode, running: Callable[[], int] = lambda: 1) -> OverlapPolicy:
    """Return the policy of a service, for those requests whose tokens may depend on the clock."""
    return MeasuredOverlap(running) if mode == "auto" else FixedOverlap(mode == "on")


def _tell(running: int, runs_ahead: bool, ahead_s: float, alone_s: float) -> None:
    said = "runs ahead" if runs_ahead else "waits for its round"
    told = "drafting %s with %d requests or more at a time: a round takes %.2f ms ahead, %.2f ms else"
    log.info(told, said, running, ahead_s * 1e3, alone_s * 1e3)
