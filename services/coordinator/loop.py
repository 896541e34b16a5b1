"""The rounds of a request. Read `Rounds.run` first, then `Rounds._round`: one round, top to bottom.

    committed ──► propose (draft) ──► verify (target) ──► accept (the rule) ──► stop? ──► committed

The coordinator owns the sequence; both workers only cache it. Nothing waits for the draft: without drafts a round is a
plain step of the target, and the text has the same distribution.

Drafting may run ahead: while the target verifies x1..xn, the draft goes on to y1..yk by a Propose of its own.

    x rejected    its residual, and y is dropped
    x all kept    the row after xn tests y1 if it has come; else it gives a bonus token, and y is dropped
    y1 rejected   its residual, and the rest of y is dropped
    y1 kept       y2..yk are the next round's drafts

Whether y1 is tested is settled by the clock and by its row of q, before its token, its p or anything later is looked
at, so that the token after xn has the law p either way. In round i, with a Propose j that ran ahead, the numbers are

    (i, 0..n-1, ACCEPT)   for x1..xn         (j, 0..k-1, DRAFT)    made y1..yk
    (i, n, ACCEPT)        for y1             (j, 0..k-2, ACCEPT)   for y2..yk, in round j
    (i, n, REPLACE)       y1's residual, or the bonus token

A round has the index of the Propose that made its drafts, no two rounds have the same, and ACCEPT and REPLACE numbers
are used by the round of their index alone: no number serves two decisions. The index of a Propose whose drafts were
dropped is not used again.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncIterator, Sequence

from opentelemetry.trace import Span

from services.common.specdec.acceptance import usable_drafts
from services.common.specdec.types import Decision, Draft
from services.coordinator.ahead import Ahead
from services.coordinator.answer import Answer, Finish
from services.coordinator.decide import decide
from services.coordinator.gamma import GammaPolicy
from services.coordinator.offload import offload
from services.coordinator.overlap import Cycle, OverlapPolicy
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
        overlap: OverlapPolicy,
        drafter: Drafter | None,
        verifier: Verifier,
        observer: Observer,
    ) -> None:
        self._plan = plan
        self._answer = answer
        self._gamma = gamma
        self._overlap = overlap
        self._drafter = drafter
        self._verifier = verifier
        self._observer = observer
        self._committed = list(plan.prompt)
        self._started_s = time.perf_counter()
        self._told = False
        # Counts every Propose that is started: with the seed, it names the random numbers of a round.
        self._indices = itertools.count()
        self._ahead: Ahead | None = None
        # Since the last Verify began, and what that is measured for.
        self._cycle: Cycle | None = None
        self._cycle_s = 0.0

    async def run(self) -> AsyncIterator[Round]:
        """Yield rounds until one of them ends the answer.

        Raises:
            TargetChangedError: Another model is the target now, and nothing has been decided yet.
            TargetUnavailableError: No target could be had in time.
            BadTargetRowError: The target sent a row, reached by the sequence, that is no distribution.
        """
        while True:
            done = await self._round()
            yield done
            if done.finish is not None:
                return

    async def close(self) -> None:
        """Drop what runs ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await ahead.drop()

    async def _round(self) -> Round:
        start_s = time.perf_counter()
        ahead = self._ahead
        index = ahead.index if ahead else next(self._indices)
        # The round adds one token besides the drafts that are kept, so more drafts than this could never be used.
        gamma = ahead.gamma if ahead else self._gamma.choose(self._answer.room - 1)
        with self._observer.round(index, gamma, len(self._committed)) as span:
            proposal = await ahead.rest() if ahead else await self._propose(index, gamma, span)
            wait_s = self._end_cycle(time.perf_counter() - start_s)
            drafts, refused = await self._usable(proposal.drafts)
            self._ahead = ahead = self._run_ahead(drafts, gamma, span)
            verification = await self._verify(index, drafts, gamma > 0 or self._gamma.primes, span)
            accept_start_s = time.perf_counter()
            # From here on it makes no difference what else of it comes: a first draft that is late is dropped.
            first, _ = await self._usable(ahead.first if ahead else ())
            decision = await self._accept(index, verification, [*drafts, *first], span)
            tokens, finish = self._extend(decision)
            if finish is not None or decision.accepted <= len(drafts):
                await self.close()
            end_s = time.perf_counter()
            done = Round(
                index=index,
                gamma=gamma,
                proposed=max(len(drafts), decision.tested),
                decision=decision,
                tokens=tokens,
                finish=finish,
                degraded=refused or proposal.degraded,
                draft=proposal.call,
                target=verification.call,
                start_s=start_s - self._started_s,
                total_s=end_s - start_s,
                accept_s=end_s - accept_start_s,
                draft_wait_s=wait_s,
                ran_ahead=ahead is not None,
                fetched=tuple(verification.fetched),
            )
            self._observer.finish_round(span, done)
        self._cycle_s = done.total_s - wait_s
        self._gamma.observe(done)
        return done

    async def _propose(self, index: int, gamma: int, parent: Span) -> Proposal:
        if gamma == 0:
            return Proposal()
        if self._drafter is None:
            return Proposal(degraded="draft absent")
        with self._observer.phase("paceline.propose", parent) as span:
            asked = index, self._committed, gamma, span
            return await self._drafter.propose(*asked, stop_below=self._gamma.stop_below)

    def _run_ahead(self, drafts: Sequence[Draft], gamma: int, parent: Span) -> Ahead | None:
        """Have the draft go on from the drafts that are about to be verified, where that may be of use."""
        # If all are kept and the last row's token comes too.
        room = self._answer.room - len(drafts) - 1
        # A draft that stopped by itself, or could not go on, would not go on now.
        if self._drafter is None or not 0 < len(drafts) == gamma or room < 2:
            return None
        cycle = self._overlap.begin()
        # The first pass takes the prompt in: its time says nothing of the others.
        self._cycle = cycle if len(self._committed) > len(self._plan.prompt) else None
        if not cycle.runs_ahead or not (next_gamma := self._gamma.choose(room - 1)):
            return None
        return Ahead(
            self._drafter,
            self._observer,
            index=next(self._indices),
            committed=self._committed,
            held=drafts,
            gamma=next_gamma,
            stop_below=self._gamma.stop_below,
            parent=parent,
        )

    def _end_cycle(self, wait_s: float) -> float:
        """Have the policy learn what a cycle took, from Verify to Verify but for the time that the client took."""
        if self._cycle is not None:
            self._overlap.end(self._cycle, self._cycle_s + wait_s)
            self._cycle = None
        return wait_s

    async def _usable(self, drafts: Sequence[Draft]) -> tuple[Sequence[Draft], str]:
        """Return the drafts before the first bad row, and what is wrong with that one."""
        size = sum(draft.q.nbytes for draft in drafts)
        good, reason = await offload(size, usable_drafts, drafts, self._plan.vocab_size)
        if reason and not self._told:
            log.warning("the draft worker's %s", reason)
            self._told = True
        return drafts[:good], reason

    async def _verify(self, index: int, drafts: Sequence[Draft], states: bool, parent: Span) -> Verification:
        with self._observer.phase("paceline.verify", parent) as span:
            return await self._verifier.verify(index, self._committed, drafts, span, states=states)

    async def _accept(self, index: int, verification: Verification, drafts: Sequence[Draft], parent: Span) -> Decision:
        with self._observer.phase("paceline.accept", parent) as span:
            return await decide(
                *(self._plan, index, len(self._committed), verification.rows, drafts),
                fetch=lambda row, support: verification.fetch(row, support, span),
            )

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
