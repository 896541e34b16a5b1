"""Drafting runs ahead, and something goes wrong: no wait but the draft's one, no token lost, nothing left over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.specdec.coupled import winner
from tests.faults.waiting import until, until_free
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import NEVER, DraftScript, TargetScript, Turn

PROMPT = [0, 1]
# A draft that is the target: everything is kept under the coupled rule, by drafts that choose as the target does.
SAME = close_law(distance=0.0, seed=2)
NEAR = close_law(distance=0.5, seed=2)
PASS_S = 0.3


class Steps(DraftScript):
    """Chooses as a coupled target does, and takes its time for every draft."""

    def __init__(self, step_s: float = 0.0, **options: Any) -> None:
        super().__init__(one_by_one=True, **options)
        self._step_s = step_s

    def draw(self, turn: Turn, offset: int) -> int:
        return winner(turn.q, turn.seed, len(turn.tokens)).token

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        return super().pause_s(turn, offset, token) or self._step_s


class Waits(Steps):
    """Stops at an offset of some proposals, until the next one comes."""

    def __init__(self, rounds: set[int], at: int) -> None:
        super().__init__()
        self._rounds, self._at = rounds, at

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        return NEVER if turn.round in self._rounds and offset == self._at else 0.0


async def generate(cluster: Cluster, **fields: Any) -> Reply:
    options = {"gamma": 2, "seed": 3, "max_tokens": 30, "verification": worker_pb2.VERIFICATION_COUPLED}
    return await cluster.generate(PROMPT, **(options | fields))


def rows(reply: Reply) -> list[pb.RoundStats]:
    return list(reply.result.speculation.per_round)


def held(reply: Reply) -> list[bool]:
    """Return which rounds began with the drafts of one that ran ahead."""
    return [False] + [row.accepted > row.gamma for row in rows(reply)[:-1]]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
async def test_a_kept_round_waits_for_the_longer_of_target_and_draft(share: float) -> None:
    """Gamma 2, so that three drafts are made in a pass, which has time for more: the next round finds them there."""
    step_s = share * PASS_S
    async with scripted_cluster(SAME, overlap="on", draft=Steps(step_s), target=TargetScript(late_s=PASS_S)) as cluster:
        ahead = await generate(cluster)
        asked = cluster.draft.requests
    async with scripted_cluster(SAME, draft=Steps(step_s), target=TargetScript(late_s=PASS_S)) as cluster:
        alone = await generate(cluster)
    assert ahead.tokens == alone.tokens
    assert held(ahead) == [False, *[True] * 9]
    # One Propose a round, each for the round after, and none for one that could not be.
    assert asked == len(rows(ahead)) == 10
    assert [row.index for row in rows(ahead)] == list(range(10))
    assert all(row.accepted == 3 for row in rows(ahead)[:-1])
    # Else each round waits for its two drafts.
    assert not any(row.ran_ahead for row in rows(alone))
    assert min(row.draft_ms for row in rows(alone) if row.gamma) > 2e3 * step_s
    waited = [row.draft_ms for row, was_held in zip(rows(ahead), held(ahead), strict=True) if was_held]
    assert sorted(waited)[len(waited) // 2] < 1e3 * step_s


async def test_a_draft_slower_than_the_target_is_waited_for_and_not_drafted_anew() -> None:
    async with scripted_cluster(SAME, overlap="on", draft=Steps(0.1), target=TargetScript(late_s=0.2)) as cluster:
        reply = await generate(cluster)
        asked = cluster.draft.requests
    assert all(held(reply)[1:])
    assert asked == len(rows(reply))
    assert all(row.proposed >= row.gamma for row in rows(reply))


@pytest.mark.parametrize("late_s", [0.02, 0.0])
async def test_dropped_proposals_cost_no_wait_and_no_stream(late_s: float) -> None:
    """Those that run ahead would take for ever: what replaces them is answered at once.

    A target that answers at once has them dropped as soon as they are asked for.
    """
    draft, target = Waits(set(range(1, 20, 2)), 0), TargetScript(late_s=late_s)
    async with scripted_cluster(NEAR, overlap="on", draft=draft, target=target) as cluster:
        replies = await asyncio.gather(*(generate(cluster, seed=seed, max_tokens=80) for seed in range(10)))
        streams = cluster.draft.streams
    assert streams == 10
    for reply in replies:
        assert len(reply.tokens) == 80
        assert reply.result.speculation.degraded_rounds == 0
        # Every second index is of a proposal that was dropped.
        assert [row.index for row in rows(reply)[:10]] == list(range(0, 20, 2))
        assert not any(held(reply)[:11])


async def test_a_stalled_draft_is_waited_for_once() -> None:
    """It stalls while it runs ahead, after the first of its drafts: the next round waits out its time, then no more."""
    draft = Waits({1}, 1)
    async with scripted_cluster(
        SAME, overlap="on", draft=draft, target=TargetScript(late_s=PASS_S), draft_timeout_s=3.0
    ) as cluster:
        reply = await generate(cluster)
    first, second, *others = rows(reply)
    assert first.accepted == 3
    assert (second.index, second.proposed, second.degraded) == (1, 0, True)
    assert all(row.degraded and row.draft_ms < 1_000 for row in others if row.gamma)


@pytest.mark.parametrize("request_number", [2, 3, 6])
async def test_a_draft_that_dies_while_it_runs_ahead_costs_drafts_only(request_number: int) -> None:
    target = TargetScript(late_s=0.02)
    async with scripted_cluster(NEAR, overlap="on", draft=Steps(die_on={request_number}), target=target) as cluster:
        disturbed = await generate(cluster, max_tokens=120)
        streams = cluster.draft.streams
        undisturbed = await generate(cluster, max_tokens=120)
        await until_free(cluster)
    assert streams == 2
    assert disturbed.tokens == undisturbed.tokens
    assert any(row.degraded for row in rows(disturbed))
    assert any(row.ran_ahead for row in rows(disturbed)[-10:])


@pytest.mark.parametrize("request_number", [1, 2, 5])
async def test_a_target_that_dies_meanwhile_changes_no_token(request_number: int) -> None:
    async with scripted_cluster(NEAR, overlap="on", draft=Steps(), target=TargetScript(late_s=0.02)) as cluster:
        undisturbed = await generate(cluster)
        cluster.target.requests = 0
        cluster.target.script = TargetScript(late_s=0.02, die_on={request_number})
        disturbed = await generate(cluster)
        assert cluster.target.streams == 3
    assert disturbed.tokens == undisturbed.tokens


@pytest.mark.parametrize("when", ["drafts run ahead", "the next round waits for them"])
async def test_a_client_that_leaves_leaves_nothing_behind(when: str) -> None:
    draft = Waits({1}, 0 if when == "drafts run ahead" else 1)
    target = TargetScript(late_s=NEVER if when == "drafts run ahead" else 0.05)
    async with scripted_cluster(SAME, overlap="on", draft=draft, target=target) as cluster:
        before = {task.get_name() for task in asyncio.all_tasks()}
        call = asyncio.create_task(generate(cluster))
        await until(lambda: cluster.draft.requests == 2, "drafting runs ahead")
        await asyncio.sleep(0.2)
        assert not call.done()
        call.cancel()
        await asyncio.wait({call})
        await until_free(cluster)
        left = [t for t in asyncio.all_tasks() if t.get_name() not in before and "coordinator" in repr(t.get_coro())]
        assert not left


async def test_nothing_runs_ahead_that_could_not_be_used() -> None:
    """Of 8 tokens the first round gives 3, the second 3 with room for 2 more: one draft and the row after it."""
    async with scripted_cluster(SAME, overlap="on", draft=Steps(), target=TargetScript(late_s=0.05)) as cluster:
        reply = await generate(cluster, max_tokens=8)
        asked = cluster.draft.requests
    assert [(row.gamma, row.emitted, row.ran_ahead) for row in rows(reply)] == [
        (2, 3, True),
        (2, 3, True),
        (1, 2, False),
    ]
    assert asked == 3
