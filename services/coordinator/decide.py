"""From rows and drafts to a decision: the rule that the request asked for, off the event loop where rows are long."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.specdec.acceptance import accept
from services.common.specdec.coupled import accept_coupled
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Decision, Draft, Row, VerificationMode
from services.coordinator.offload import offload
from services.coordinator.types import Plan


async def decide(plan: Plan, index: int, position: int, rows: Sequence[Row], drafts: Sequence[Draft]) -> Decision:
    """Apply the rule to one round.

    Args:
        plan: Names the rule and the seed.
        index: Of the round.
        position: How many tokens are committed.
        rows: The target's, one for each draft and one more.
        drafts: The drafts to test.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution.
    """

    def number(offset: int, purpose: Purpose) -> float:
        return uniform(plan.seed, index, offset, purpose)

    size = sum(row.nbytes for row in rows)
    if plan.verification is VerificationMode.COUPLED:
        return await offload(size, accept_coupled, rows, drafts, plan.vocab_size, plan.seed, position)
    return await offload(size, accept, rows, drafts, plan.vocab_size, number)
