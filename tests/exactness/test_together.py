"""All at once: gamma that adapts, drafts that stop by themselves and run ahead, truncated q, rows in part."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Row
from tests.exactness.collect import LENGTH, PROMPT, law_for
from tests.exactness.test_adaptive import StopsByConfidence, costs
from tests.exactness.test_overlap import seeds
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.planted import PLAIN
from tests.support.scripts import TargetScript, Turn
from tests.support.statistics import Answers, power, verdicts

__all__ = ["costs", "seeds"]

LAW = law_for(3)
IN_PART = TargetScript(late_s=0.02, in_part=True)
SETTINGS = {"overlap": "on", "row_head": 1, "max_gamma": 5}
COUPLED = {"verification": worker_pb2.VERIFICATION_COUPLED}


class Everything(StopsByConfidence):
    """Sends drafts one by one, some of them late, from the three likeliest tokens of q alone, and stops by itself."""

    def __init__(self) -> None:
        super().__init__(one_by_one=True)

    def sampled(self, turn: Turn) -> Row:
        q = turn.q.dense(turn.law.vocab_size)
        ids = np.sort(np.argsort(-q)[:3])
        return Row((q[ids] / q[ids].sum()).astype(np.float32), ids.astype(np.uint32))

    def reported(self, turn: Turn) -> Row:
        return self.sampled(turn)

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        return 0.03 if uniform(turn.seed ^ 1, turn.round, offset, Purpose.ACCEPT) < 0.1 else 0.0


async def answers(cluster: Cluster, requests: int, **fields: Any) -> list[Reply]:
    gate = asyncio.Semaphore(32)

    async def one(number: int) -> Reply:
        seed = {"seed": number if fields else None}
        async with gate:
            return await cluster.generate(PROMPT, max_tokens=LENGTH, params=PLAIN, timeout_s=240, **seed, **fields)

    return await asyncio.gather(*(one(number) for number in range(requests)))


def rounds_of(replies: list[Reply]) -> list[pb.RoundStats]:
    return [done for reply in replies for done in reply.result.speculation.per_round]


@pytest.mark.usefixtures("costs", "seeds")
async def test_law() -> None:
    async with scripted_cluster(LAW, draft=Everything(), target=IN_PART, **SETTINGS) as cluster:
        got = await answers(cluster, 90)
    rounds = rounds_of(got)
    print(sum(done.fetched_rows for done in rounds), len(rounds), sum(done.accepted > done.gamma for done in rounds))
    # There was enough of everything.
    assert len({done.gamma for done in rounds}) > 3
    assert sum(done.accepted > done.gamma for done in rounds) > 0.02 * len(rounds)
    assert sum(0 < done.proposed < done.gamma for done in rounds) > 0.02 * len(rounds)
    assert sum(done.fetched_rows for done in rounds) > 0.02 * len(rounds)
    found = Answers(PROMPT, np.array([each.tokens for each in got]), np.array([each.offsets for each in got]))
    p = LAW.p(PLAIN)
    assert power(found.by_context(LAW.vocab_size), p.reshape(-1, LAW.vocab_size), shift=0.1) > 0.99
    assert not [str(verdict) for verdict in verdicts(found, p) if not verdict.passed]


@pytest.mark.usefixtures("costs")
async def test_a_seed_has_the_tokens_of_the_target_alone() -> None:
    async with scripted_cluster(LAW, draft=Everything(), target=IN_PART, **SETTINGS) as cluster:
        got = await answers(cluster, 6, **COUPLED)
        assert any(done.ran_ahead for done in rounds_of(got))
        alone = await answers(cluster, 6, gamma=0, **COUPLED)
    assert [reply.tokens for reply in got] == [reply.tokens for reply in alone]
