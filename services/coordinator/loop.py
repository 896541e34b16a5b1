"""The rounds of a request. Read `Rounds.run` first, then `Rounds._round`: one round, top to bottom.

    committed ──► propose (draft) ──► verify (target) ──► accept (the rule) ──► stop? ──► committed

The coordinator owns the sequence; both workers only cache it. Nothing waits for the draft: without drafts a round is a
plain step of the target, and the text has the same distribution.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence

from opentelemetry.trace import Span

from services.common.specdec.acceptance import usable_drafts
from services.common.specdec.types import Decision, Draft, Row
from services.coordinator.answer import Answer, Finish
from services.coordinator.decide import decide
from services.coordinator.gamma import GammaPolicy
from services.coordinator.offload import offload
from services.coordinator.ports import Drafter, Observer, Proposal, Verification, Verifier
from services.coordinator.types import Plan, Round

log = logging.getLogger(__name__)


class Rounds:
    """One request's sequence and the rounds that extend it."""

    def __init__(
        self,
        plan: Plan,
        answer: Answer,
        gamma: GammaPolicy,
        drafter: Drafter | None,
        verifier: Verifier,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._answer = answer
        self._gamma = gamma
        self._drafter = drafter
        self._verifier = verifier
        self._observer = observer
        self._committed = list(plan.prompt)
        self._started_s = time.perf_counter()
        self._told = False

    async def run(self) -> AsyncIterator[Round]:
        """Yield rounds until one of them ends the answer.

        Raises:
            TargetChangedError: Another model is the target now, and nothing has been decided yet.
            TargetUnavailableError: No target could be had in time.
            BadTargetRowError: The target sent a row, reached by the sequence, that is no distribution.
        """
        # Counts every Propose that is started: with the seed, it names the random numbers of a round.
        index = 0
        while True:
            done = await self._round(index)
            yield done
            if done.finish is not None:
                return
            index += 1

    async def _round(self, index: int) -> Round:
        start_s = time.perf_counter()
        # The round adds one token besides the drafts that are kept, so more drafts than this could never be used.
        gamma = self._gamma.choose(self._answer.room - 1)
        with self._observer.round(index, gamma, len(self._committed)) as span:
            proposal = await self._propose(index, gamma, span)
            drafts, refused = await self._usable(proposal.drafts)
            verification = await self._verify(index, drafts, span)
            accept_start_s = time.perf_counter()
            decision = await self._accept(index, verification.rows, drafts, span)
            tokens, finish = self._extend(decision)
            end_s = time.perf_counter()
            done = Round(
                index=index,
                gamma=gamma,
                proposed=len(drafts),
                decision=decision,
                tokens=tokens,
                finish=finish,
                degraded=refused or proposal.degraded,
                draft=proposal.call,
                target=verification.call,
                start_s=start_s - self._started_s,
                total_s=end_s - start_s,
                accept_s=end_s - accept_start_s,
            )
            self._observer.finish_round(span, done)
        self._gamma.observe(done)
        return done

    async def _propose(self, index: int, gamma: int, parent: Span) -> Proposal:
        if gamma == 0:
            return Proposal()
        if self._drafter is None:
            return Proposal(degraded="draft absent")
        with self._observer.phase("paceline.propose", parent) as span:
            return await self._drafter.propose(index, self._committed, gamma, span)

    async def _usable(self, drafts: Sequence[Draft]) -> tuple[Sequence[Draft], str]:
        """Return the drafts before the first bad row, and what is wrong with that one."""
        size = sum(draft.q.nbytes for draft in drafts)
        good, reason = await offload(size, usable_drafts, drafts, self._plan.vocab_size)
        if reason and not self._told:
            log.warning("request %s: the draft worker's %s", self._plan.request_id, reason)
            self._told = True
        return drafts[:good], reason

    async def _verify(self, index: int, drafts: Sequence[Draft], parent: Span) -> Verification:
        with self._observer.phase("paceline.verify", parent) as span:
            return await self._verifier.verify(index, self._committed, [draft.token for draft in drafts], span)

    async def _accept(self, index: int, rows: Sequence[Row], drafts: Sequence[Draft], parent: Span) -> Decision:
        with self._observer.phase("paceline.accept", parent):
            return await decide(self._plan, index, rows, drafts)

    def _extend(self, decision: Decision) -> tuple[tuple[int, ...], Finish | None]:
        """Commit the decided tokens one by one, each tested for a stop; nothing after the first stop exists."""
        finish: Finish | None = None
        count = 0
        for token, origin in zip(decision.tokens, decision.origins, strict=True):
            count += 1
            finish = self._answer.push(token, origin)
            if finish is not None:
                break
        tokens = decision.tokens[:count]
        self._committed += tokens
        return tokens, finish
