"""From rows and drafts to a decision: the rule that the request asked for, off the event loop where rows are long."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.specdec.acceptance import accept
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Decision, Draft, Row
from services.coordinator.offload import offload
from services.coordinator.types import Plan


async def decide(plan: Plan, index: int, rows: Sequence[Row], drafts: Sequence[Draft]) -> Decision:
    """Apply the rule to one round.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution.
    """

    def number(offset: int, purpose: Purpose) -> float:
        return uniform(plan.seed, index, offset, purpose)

    size = sum(row.nbytes for row in rows)
    return await offload(size, accept, rows, drafts, plan.vocab_size, number)
