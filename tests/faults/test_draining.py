"""A worker that is told to stop says so: its sessions move between two rounds, or stay where there is no other."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.faults.waiting import until, until_free
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripted import ScriptedWorker
from tests.support.scripts import DraftScript, TargetScript

PROMPT = [0, 1, 2, 3]
LAW = close_law(distance=0.5, seed=2)
REQUEST: dict[str, Any] = {"gamma": 2, "max_tokens": 120, "seed": 21}
# So that an answer outlasts a move.
SLOW = TargetScript(late_s=0.01)


@pytest.fixture(scope="module")
def undisturbed() -> Reply:
    async def run() -> Reply:
        async with scripted_cluster(LAW) as cluster:
            return await cluster.generate(PROMPT, **REQUEST)

    return asyncio.run(run())


def check_same(reply: Reply, undisturbed: Reply) -> None:
    assert reply.tokens == undisturbed.tokens
    assert reply.origins == undisturbed.origins
    assert reply.result.speculation.degraded_rounds == 0


async def drained_in_mid_text(cluster: Cluster, worker: ScriptedWorker) -> Reply:
    """Generate, and have a worker drain after a few rounds."""
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
        await until(lambda: worker.requests >= 4, "four rounds")
        await worker.drain()
    return answer.result()


async def test_a_target_that_drains_is_left_for_another(undisturbed: Reply, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_cluster(LAW, target=SLOW, spares=1) as cluster:
        (spare,) = cluster.spare_targets
        spare.script = SLOW
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
            await until(lambda: cluster.target.requests >= 4, "four rounds")
            await spare.serve()
            await cluster.target.drain()
            await until(lambda: cluster.target.open_streams == 0, "it has been left")
            assert not answer.done()
        assert cluster.target.streams == 1
        assert spare.streams >= 1
        await until(lambda: spare.open_streams == 0, "the other is free too")
    check_same(answer.result(), undisturbed)
    assert "target lost" not in caplog.text


async def test_a_draft_that_drains_is_left_for_another(undisturbed: Reply, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_cluster(LAW, target=SLOW, spares=1) as cluster:
        (spare,) = cluster.spare_drafts
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
            await until(lambda: cluster.draft.requests >= 4, "four rounds")
            await spare.serve()
            await cluster.draft.drain()
            await until(lambda: cluster.draft.open_streams == 0, "it has been left")
            assert not answer.done()
        assert cluster.draft.streams == 1
        await until(lambda: spare.open_streams == 0, "the other is free too")
    check_same(answer.result(), undisturbed)
    assert "draft lost" not in caplog.text


@pytest.mark.parametrize("which", ["target", "draft"])
async def test_one_that_drains_alone_is_used_as_long_as_it_answers(
    which: str, undisturbed: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(LAW, target=SLOW) as cluster:
        reply = await drained_in_mid_text(cluster, getattr(cluster, which))
        await until_free(cluster)
    check_same(reply, undisturbed)
    assert f"{which} lost" not in caplog.text


@pytest.mark.parametrize(
    "script",
    [
        TargetScript(die_on=range(1, 10_000), die_as=grpc.StatusCode.RESOURCE_EXHAUSTED),
        TargetScript(die_on=range(1, 10_000), die_as=grpc.StatusCode.FAILED_PRECONDITION),
        TargetScript(stall_on=range(1, 10_000)),
    ],
    ids=["full", "other weights", "silent"],
)
async def test_a_session_stays_where_the_other_cannot_take_it(
    script: TargetScript, undisturbed: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_cluster(LAW, target=SLOW, spares=1) as cluster:
        (spare,) = cluster.spare_targets
        spare.script = script
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
            await until(lambda: cluster.target.requests >= 4, "four rounds")
            await spare.serve()
            await cluster.target.drain()
            await until(lambda: spare.requests >= 1, "the other is asked")
        assert cluster.target.streams == 1
        await until(lambda: cluster.target.open_streams + spare.open_streams == 0, "both are free")
    check_same(answer.result(), undisturbed)
    assert "target lost" not in caplog.text


async def test_a_lone_target_that_ends_in_mid_text_is_waited_for(undisturbed: Reply) -> None:
    async with scripted_cluster(LAW, target=SLOW) as cluster, asyncio.TaskGroup() as group:
        answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
        await until(lambda: cluster.target.requests >= 4, "four rounds")
        await cluster.target.drain()
        drained_at = cluster.target.requests
        await until(lambda: cluster.target.requests >= drained_at + 4, "four more rounds")
        await cluster.target.stop()
        assert not answer.done()
        await cluster.target.start()
    check_same(answer.result(), undisturbed)


async def test_a_client_that_leaves_while_its_session_moves_frees_both() -> None:
    async with scripted_cluster(LAW, target=SLOW, spares=1) as cluster:
        (spare,) = cluster.spare_targets
        spare.script = TargetScript(stall_on=range(1, 10_000))
        answer = asyncio.create_task(cluster.generate(PROMPT, **REQUEST))
        await until(lambda: cluster.target.requests >= 4, "four rounds")
        await spare.serve()
        await cluster.target.drain()
        await until(lambda: spare.open_streams == 1, "the move has begun")
        answer.cancel()
        await asyncio.wait({answer})
        await until(lambda: cluster.target.open_streams + spare.open_streams == 0, "both are free")
        await until_free(cluster)


async def test_under_load_no_stream_fails_and_none_stays(caplog: pytest.LogCaptureFixture) -> None:
    seeds = range(8)
    async with scripted_cluster(LAW, target=SLOW, spares=1) as cluster:
        expected = [await cluster.generate(PROMPT, **REQUEST | {"seed": seed}) for seed in seeds]
        (target,), (draft,) = cluster.spare_targets, cluster.spare_drafts
        target.script = SLOW
        await target.serve()
        await draft.serve()
        cluster.draft.script = DraftScript()
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(cluster.generate(PROMPT, **REQUEST | {"seed": seed})) for seed in seeds]
            await until(lambda: cluster.target.requests + target.requests >= 40, "all are running")
            await cluster.target.drain()
            await cluster.draft.drain()
            await until(lambda: cluster.target.open_streams + cluster.draft.open_streams == 0, "both have been left")
            assert not any(answer.done() for answer in answers)
    for answer, alone in zip(answers, expected, strict=True):
        check_same(answer.result(), alone)
    assert "lost" not in caplog.text
