"""Gamma chosen round by round, and drafts that stop by themselves: the law is p at every offset."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.v1 import coordinator_pb2 as pb
from services.common.specdec.types import Row
from services.coordinator.gamma import AdaptiveGamma
from services.coordinator.types import Round
from tests.exactness.collect import LENGTH, PROMPT, law_for
from tests.support.cluster import scripted_cluster
from tests.support.laws import Law, context
from tests.support.planted import PLAIN
from tests.support.scripts import DraftScript, Turn
from tests.support.statistics import SIGNIFICANCE, Answers, verdicts

MOST = 5


@dataclass
class StopsByConfidence(DraftScript):
    """Stops where the next draft would be kept with too little probability, judged from those before it."""

    asked: list[float] = field(default_factory=list)

    def goes_on(self, turn: Turn, offset: int) -> bool:
        self.asked.append(turn.stop_below)
        rows = turn.law.q_rows(turn.params)
        reached = 1.0
        for i in range(len(turn.tokens) - offset, len(turn.tokens)):
            reached *= rows[context(turn.tokens[:i])].weight(turn.tokens[i]) ** 0.5
        return reached * 0.8 >= turn.stop_below


@dataclass
class LooksFirst(StopsByConfidence):
    """The same with the token that was just sampled: one that seems unsure is thrown away."""

    def goes_on(self, turn: Turn, offset: int) -> bool:
        return True

    def keeps(self, turn: Turn, token: int, q: Row) -> bool:
        self.asked.append(turn.stop_below)
        return q.weight(token) ** 0.5 * 0.8 >= turn.stop_below


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that do not depend on the machine: drafts neither free nor dear, so that gamma follows what was kept."""
    learn = AdaptiveGamma.observe

    def by_script(policy: AdaptiveGamma, done: Round) -> None:
        target = dataclasses.replace(done.target, elapsed_s=0.02, batch_size=1, pass_tokens=done.proposed + 1)
        learn(policy, dataclasses.replace(done, target=target, total_s=0.021 + 0.005 * done.proposed))

    monkeypatch.setattr(AdaptiveGamma, "observe", by_script)


async def answers_of(law: Law, script: DraftScript, requests: int) -> tuple[Answers, list[pb.RoundStats]]:
    rounds: list[pb.RoundStats] = []
    async with scripted_cluster(law, draft=script, max_gamma=MOST, default_gamma=4) as cluster:
        gate = asyncio.Semaphore(32)

        async def one() -> tuple[list[int], list[int]]:
            async with gate:
                # Without a seed: with one gamma would be fixed.
                reply = await cluster.generate(PROMPT, max_tokens=LENGTH, params=PLAIN, timeout_s=240, seed=None)
            assert reply.result.adaptive_gamma
            assert reply.result.gamma == MOST
            rounds.extend(reply.result.speculation.per_round)
            return reply.tokens, reply.offsets

        replies = await asyncio.gather(*(one() for _ in range(requests)))
    return Answers(PROMPT, np.array([r[0] for r in replies]), np.array([r[1] for r in replies])), rounds


@pytest.mark.usefixtures("costs")
async def test_law_at_a_gamma_that_adapts() -> None:
    law = law_for(3)
    answers, rounds = await answers_of(law, DraftScript(), 60)
    assert len({done.gamma for done in rounds}) > 3
    assert not [str(verdict) for verdict in verdicts(answers, law.p(PLAIN)) if not verdict.passed]


@pytest.mark.usefixtures("costs")
async def test_law_with_a_draft_that_stops_by_itself() -> None:
    law, script = law_for(3), StopsByConfidence()
    answers, rounds = await answers_of(law, script, 60)
    assert {0.0} < set(script.asked), "nothing is known at first, then it has a price"
    assert max(script.asked) < 1
    stopped = sum(0 < done.proposed < done.gamma for done in rounds)
    assert stopped > 0.05 * len(rounds)
    assert not any(done.degraded for done in rounds)
    assert not [str(verdict) for verdict in verdicts(answers, law.p(PLAIN)) if not verdict.passed]


@pytest.mark.usefixtures("costs")
async def test_a_stop_after_a_look_at_the_token_is_found() -> None:
    law = law_for(3)
    answers, _ = await answers_of(law, LooksFirst(), 60)
    assert min(verdict.p_value for verdict in verdicts(answers, law.p(PLAIN))) < SIGNIFICANCE
