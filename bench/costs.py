"""What the service spends on a round besides the models' forward passes, and where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.v1.coordinator_pb2 import RoundStats


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Milliseconds of one round; `own` is the sum of the five after it.

    Attributes:
        drafts: How many drafts were verified: no milliseconds.
        total: Of the round.
        forward: In forward passes and what the device does after them, both models.
        own: total less forward.
        draft: Propose, its forward passes not counted.
        wire: Verify, less what the target worker says it spent.
        worker: The target worker, its forward pass not counted.
        accept: Checking rows, and the rule.
        rest: Of the coordinator.
        between: From the round's end to the next one's start: text goes to the client. 0 for the last.
    """

    drafts: float
    total: float
    forward: float
    own: float
    draft: float
    wire: float
    worker: float
    accept: float
    rest: float
    between: float


def round_costs(rounds: Sequence[RoundStats]) -> Iterable[RoundCost]:
    """Return what each round of an answer cost."""
    for i, each in enumerate(rounds):
        ended_ms = each.start_ms + each.total_ms
        forward = each.draft.forward_ms + each.target.forward_ms
        yield RoundCost(
            drafts=each.proposed,
            total=each.total_ms,
            forward=forward,
            own=each.total_ms - forward,
            draft=each.draft_ms - each.draft.forward_ms,
            wire=each.verify_ms - each.target.service_ms,
            worker=each.target.service_ms - each.target.forward_ms,
            accept=each.accept_ms,
            rest=each.total_ms - each.draft_ms - each.verify_ms - each.accept_ms,
            between=rounds[i + 1].start_ms - ended_ms if i + 1 < len(rounds) else 0.0,
        )
