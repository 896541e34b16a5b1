"""What the next pass feeds: the requests that wait, first come first served, within the limits of a pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class PassLimits:
    """How large a pass may become.

    Attributes:
        prefill_chunk: Most positions a pass, over all sessions, whose logits nobody asked for: a long prompt is fed in
            chunks of this size, and delays the sessions that share its passes by one chunk at most. A request with no
            more than a sixteenth of it comes in besides.
        positions: Most positions a pass in all.
    """

    prefill_chunk: int = 256
    positions: int = 1024


class Waiting(Protocol):
    """A request that waits for its tokens to be fed."""

    @property
    def pending(self) -> int:
        """Positions to feed, those whose logits are wanted included."""

    @property
    def rows(self) -> int:
        """Logits are wanted after each of the last `rows` of them."""


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Share(Generic[W]):
    """A request's part in a pass.

    Attributes:
        work: The request.
        count: Its next `count` positions are fed.
        complete: They are the last ones, and their logits are wanted.
    """

    work: W
    count: int
    complete: bool


def plan_pass(waiting: Iterable[W], limits: PassLimits) -> list[Share[W]]:
    """Return who takes part in the next pass, and with how much; never empty where anybody waits.

    Every request takes part that fits. Whether a pass waits for more of them is settled before, see `Gathering`.
    """
    shares: list[Share[W]] = []
    prefill, room = limits.prefill_chunk, limits.positions
    # The few tokens that a running session catches up with, its last draft for one, do not wait for a prompt's end.
    few = max(1, prefill // 16)
    for work in waiting:
        before = work.pending - work.rows
        if before <= max(prefill, few):
            # The first one always fits: a request larger than a pass would wait for ever.
            if work.pending <= room or not shares:
                shares.append(Share(work, work.pending, complete=True))
                prefill, room = max(0, prefill - before), room - work.pending
        elif chunk := min(prefill, room):
            shares.append(Share(work, chunk, complete=False))
            prefill, room = prefill - chunk, room - chunk
        if room <= 0:
            break
    return shares
