"""From rows and drafts to a decision: the rule that the request asked for, off the event loop where rows are long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from services.common.specdec.acceptance import RowNeededError, accept
from services.common.specdec.coupled import accept_coupled
from services.common.specdec.partial import AnyRow, Ids
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Decision, Draft, VerificationMode
from services.coordinator.offload import offload
from services.coordinator.types import Plan


async def decide(
    plan: Plan,
    index: int,
    position: int,
    rows: Sequence[AnyRow],
    drafts: Sequence[Draft],
    fetch: Callable[[int, Ids | None], Awaitable[AnyRow]],
) -> Decision:
    """Apply the rule to one round, fetching what it needs of rows that came in part.

    Args:
        plan: Names the rule and the seed.
        index: Of the round.
        position: How many tokens are committed.
        rows: The target's, one for each draft and one more.
        drafts: The drafts to test.
        fetch: Gets a row again, by its index: over a support, or whole for None.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution.
        TargetUnavailableError: A row could not be fetched in time.
    """
    rows = list(rows)
    while True:
        try:
            return await _apply(plan, index, position, rows, drafts)
        except RowNeededError as needed:
            # The same numbers decide again, so nothing that has been decided changes. A row is fetched twice at most:
            # over the support of its q, then whole.
            rows[needed.offset] = await fetch(needed.offset, needed.support)


async def _apply(plan: Plan, index: int, position: int, rows: Sequence[AnyRow], drafts: Sequence[Draft]) -> Decision:
    def number(offset: int, purpose: Purpose) -> float:
        return uniform(plan.seed, index, offset, purpose)

    size = sum(row.nbytes for row in rows)
    if plan.verification is VerificationMode.COUPLED:
        return await offload(size, accept_coupled, rows, drafts, plan.vocab_size, plan.seed, position)
    return await offload(size, accept, rows, drafts, plan.vocab_size, number)
