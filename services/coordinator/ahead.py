"""One Propose that runs ahead of a round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from opentelemetry.trace import Span

from services.common.specdec.types import Draft
from services.coordinator.ports import Drafter, Observer, Proposal


class Ahead:
    """Drafts y1..yk that follow the ones being verified: y1 for the round's last row, the rest for the next round.

    Attributes:
        index: Of the Propose, and of the round that verifies y2..yk.
        gamma: Drafts for that round, k - 1.
    """

    def __init__(
        self,
        drafter: Drafter,
        observer: Observer,
        *,
        index: int,
        committed: Sequence[int],
        held: Sequence[Draft],
        gamma: int,
        stop_below: float,
        parent: Span,
    ) -> None:
        """Begin to draft.

        Args:
            drafter: Is asked nothing else until this is over.
            observer: Of the request.
            index: Of this Propose.
            committed: The text.
            held: The drafts that are being verified.
            gamma: Drafts for the next round.
            stop_below: See `Drafter.propose`.
            parent: The span of the round that this runs ahead of.
        """
        self.index = index
        self.gamma = gamma
        self._stop_below = stop_below
        self._arrived: list[Draft] = []
        # The text grows while this goes on.
        text, tokens = tuple(committed), [draft.token for draft in held]
        self._task = asyncio.create_task(self._propose(drafter, observer, text, tokens, parent))

    @property
    def first(self) -> Sequence[Draft]:
        """y1 if it has come, else nothing."""
        return self._arrived[:1]

    async def rest(self) -> Proposal:
        """Wait for y2..yk, no longer than a round waits for its drafts."""
        proposal = await self._task
        return Proposal(proposal.drafts[1:], proposal.call, proposal.degraded)

    async def drop(self) -> None:
        """Give it up, without a wait for the worker."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _propose(
        self, drafter: Drafter, observer: Observer, committed: Sequence[int], held: Sequence[int], parent: Span
    ) -> Proposal:
        with observer.phase("paceline.propose", parent, self.index) as span:
            return await drafter.propose(
                *(self.index, committed, self.gamma + 1, span),
                stop_below=self._stop_below,
                held=held,
                arrived=self._arrived,
            )
