"""Whether drafting runs ahead while the target verifies.

It saves the next round's drafting where everything is kept, and costs where draft and target share a machine, or where
the draft has to leave what it was doing. Tokens a round are the same with it and without it, so the two are compared by
the time from one Verify to the next: measured, and for all requests of the service together, since what one request's
drafting costs may fall on the others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from services.coordinator.trials import Trials, Turn

log = logging.getLogger(__name__)

OverlapMode: TypeAlias = Literal["auto", "on", "off"]

# Cycles of a trial: their mean is then known to some 3% where everything is kept in about half of them.
_TRIAL: Final = 48


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle's part in the comparison: from a round's Verify to the next round's.

    Attributes:
        runs_ahead: Drafting goes on meanwhile.
        turn: In the trials; None where there are none.
    """

    runs_ahead: bool
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
    """What takes less time, found by trying both in turn."""

    def __init__(self) -> None:
        self._trials = Trials(_TRIAL, _tell)

    def begin(self) -> Cycle:
        """Begin a cycle."""
        turn = self._trials.begin()
        return Cycle(turn.other, turn)

    def end(self, cycle: Cycle, spent_s: float) -> None:
        """Learn what a cycle took."""
        if cycle.turn is not None:
            self._trials.end(cycle.turn, spent_s)


def overlap_policy(mode: OverlapMode) -> OverlapPolicy:
    """Return the policy of a service, for those requests whose tokens may depend on the clock."""
    return MeasuredOverlap() if mode == "auto" else FixedOverlap(mode == "on")


def _tell(runs_ahead: bool, ahead_s: float, alone_s: float) -> None:
    said = "runs ahead" if runs_ahead else "waits for its round"
    log.info("drafting %s: a round takes %.2f ms ahead, %.2f ms else", said, ahead_s * 1e3, alone_s * 1e3)
