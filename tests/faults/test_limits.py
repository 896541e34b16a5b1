"""Requests that end early: too many, too late, cancelled, or by a bug. Both workers are free within one pass."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from services.cli.client import CallError, stream_answer
from services.common.rpc.errors import RpcError, retry_after_s
from services.coordinator.admission import Admission
from services.coordinator.clients import TargetSession
from services.coordinator.instruments import Instruments
from tests.faults.waiting import until, until_free
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import DraftScript, TargetScript

PROMPT = [0, 1]
LAW = close_law(distance=0.5, seed=2)
STATUS = grpc.StatusCode
SLOW = TargetScript(late_s=0.02)
STUCK = TargetScript(stall_on=range(5, 10_000))


def request(**fields: Any) -> pb.GenerateRequest:
    made = {"gamma": 2, "max_tokens": 4000, "stop": pb.StopConditions(ignore_eos=True), "request_id": "the-one"}
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), **(made | fields))


async def failure(cluster: Cluster, timeout_s: float | None = 30, **fields: Any) -> grpc.aio.AioRpcError:
    call = cluster.stub.Generate(request(**fields), timeout=timeout_s)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in call]
    return caught.value


def test_what_a_refused_client_is_told_follows_the_requests_that_end() -> None:
    """A place is free when one of those that run ends: the time of one, shared by all."""

    async def run() -> list[float]:
        admission = Admission(4, Instruments())
        told = [admission.retry_after_s()]
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(admission.admitted())
            admission._learn(6.0)
            told.append(admission.retry_after_s())
            admission._learn(16.0)
            told.append(admission.retry_after_s())
            await stack.enter_async_context(admission.admitted())
            told.append(admission.retry_after_s())
            with pytest.raises(RpcError) as refused:
                await stack.enter_async_context(admission.admitted())
            assert refused.value.retry_after_s == told[-1]
        return told

    assert asyncio.run(run()) == pytest.approx([1.0, 2.0, 7 / 3, 7 / 4])


async def test_more_requests_than_may_run_are_refused() -> None:
    async with scripted_cluster(LAW, target=SLOW, max_requests=2, wait_for_draft=False) as cluster:
        running = [cluster.stub.Generate(request(), timeout=60) for _ in range(2)]
        for call in running:
            await anext(aiter(call))
        error = await failure(cluster)
        assert error.code() is STATUS.RESOURCE_EXHAUSTED
        assert error.details() == "2 requests are running, the limit (--max-requests)"
        # No request has ended yet, so nobody knows.
        assert retry_after_s(error.trailing_metadata() or ()) == 1.0
        with pytest.raises(CallError, match=r"^RESOURCE_EXHAUSTED: 2 requests are running.*; try again in 1 s$"):
            await stream_answer(cluster.coordinator.address, request(), lambda _: None)
        for call in running:
            await anext(aiter(call))
        # One that leaves makes room, and so does one that fails.
        running[0].cancel()
        await until(lambda: cluster.target.open_streams == 1, "one has left")
        assert (await failure(cluster, max_tokens=0)).code() is STATUS.INVALID_ARGUMENT
        assert len((await cluster.generate(PROMPT, max_tokens=3)).tokens) == 3
        running[1].cancel()


@pytest.mark.parametrize("target", [SLOW, STUCK], ids=["streaming", "in a pass"])
async def test_the_clients_deadline(target: TargetScript) -> None:
    async with scripted_cluster(LAW, target=target) as cluster:
        error = await failure(cluster, timeout_s=0.4)
        await until_free(cluster)
    assert error.code() is STATUS.DEADLINE_EXCEEDED


@pytest.mark.parametrize("target", [SLOW, STUCK], ids=["streaming", "in a pass"])
async def test_the_servers_deadline_where_the_client_sets_none(target: TargetScript) -> None:
    async with scripted_cluster(LAW, target=target, default_deadline_s=0.4) as cluster:
        error = await failure(cluster, timeout_s=None)
        await until_free(cluster)
    assert error.code() is STATUS.DEADLINE_EXCEEDED
    assert error.details() == "the server's (--default-deadline-s) deadline of 0.4 s has passed"


async def test_a_longer_deadline_of_the_client_wins() -> None:
    async with scripted_cluster(LAW, target=SLOW, default_deadline_s=0.05) as cluster:
        reply = await cluster.generate(PROMPT, gamma=0, max_tokens=10, timeout_s=30)
    assert len(reply.tokens) == 10


async def test_no_deadline_is_longer_than_the_servers_longest() -> None:
    async with scripted_cluster(
        LAW, target=STUCK, default_deadline_s=0.3, max_deadline_s=0.4, wait_for_draft=False
    ) as cluster:
        error = await failure(cluster, timeout_s=60)
        await until_free(cluster)
    assert error.code() is STATUS.DEADLINE_EXCEEDED
    assert error.details() == "the server's (--max-deadline-s) deadline of 0.4 s has passed"


@pytest.mark.parametrize("bug", [ZeroDivisionError, TimeoutError, asyncio.InvalidStateError])
@pytest.mark.parametrize("where", ["decide.accept", "loop.usable_drafts", "service.plan", "service.speculation_stats"])
async def test_a_bug_is_told_by_request_id_only(
    where: str, bug: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise bug("a secret of the server")

    async with scripted_cluster(LAW) as cluster:
        monkeypatch.setattr(f"services.coordinator.{where}", fail)
        with caplog.at_level(logging.ERROR):
            error = await failure(cluster, max_tokens=5)
        await until_free(cluster)
        monkeypatch.undo()
        assert len((await cluster.generate(PROMPT, max_tokens=3)).tokens) == 3
    assert error.code() is STATUS.INTERNAL
    assert error.details() == "internal error; the log has it under request id the-one"
    assert "the-one" in caplog.text
    assert "a secret of the server" in caplog.text


@pytest.mark.parametrize(
    ("draft", "target", "requests"),
    [
        (DraftScript(), SLOW, (1, 1)),
        # A pass that never ends: whoever waits for it is freed all the same.
        (DraftScript(), TargetScript(stall_on={5}), (5, 5)),
        (DraftScript(stall_on={3}), TargetScript(), (3, 2)),
    ],
    ids=["streaming", "the target in a pass", "the draft in a pass"],
)
@pytest.mark.parametrize("how", ["cancel", "close the channel"])
async def test_a_client_that_leaves_frees_both_workers_within_one_pass(
    draft: DraftScript, target: TargetScript, requests: tuple[int, int], how: str
) -> None:
    async with scripted_cluster(LAW, draft=draft, target=target) as cluster:
        async with grpc.aio.insecure_channel(cluster.coordinator.address) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            call = stub.Generate(request(), timeout=60)
            await anext(aiter(call))
            await until(
                lambda: (cluster.draft.requests, cluster.target.requests) >= requests, "the workers are where they stay"
            )
            assert cluster.draft.open_streams == cluster.target.open_streams == 1
            if how == "cancel":
                call.cancel()
            else:
                await channel.close()
        await until_free(cluster)
        if target is not SLOW:
            assert (cluster.draft.requests, cluster.target.requests) == requests
        cluster.draft.script, cluster.target.script = DraftScript(), TargetScript()
        assert len((await cluster.generate(PROMPT, max_tokens=3)).tokens) == 3


async def test_many_that_leave_at_once_leave_nothing_behind() -> None:
    async with scripted_cluster(LAW, target=SLOW, max_requests=40) as cluster:
        for _ in range(2):
            calls = [cluster.stub.Generate(request(), timeout=60) for _ in range(40)]
            for call in calls:
                await anext(aiter(call))
            for call in calls:
                call.cancel()
            await until_free(cluster)
        assert len((await cluster.generate(PROMPT, max_tokens=3)).tokens) == 3


async def test_an_answer_that_is_whole_frees_both_workers() -> None:
    async with scripted_cluster(LAW) as cluster:
        await cluster.generate(PROMPT, gamma=2, max_tokens=20)
        await until_free(cluster)
        assert cluster.draft.streams == cluster.target.streams == 1


async def test_the_coordinator_stopping_ends_streams_after_the_grace() -> None:
    async with scripted_cluster(LAW, target=SLOW, shutdown_grace_s=0.3) as cluster:
        call = cluster.stub.Generate(request(), timeout=60)
        await anext(aiter(call))
        stopping = asyncio.create_task(cluster.coordinator.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
        await stopping
        await until_free(cluster)
    assert caught.value.code() in (STATUS.UNAVAILABLE, STATUS.CANCELLED)


async def test_one_worker_that_cannot_be_closed_does_not_keep_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    close = TargetSession.close

    async def interrupted(session: TargetSession) -> None:
        await close(session)
        raise asyncio.CancelledError

    monkeypatch.setattr(TargetSession, "close", interrupted)
    async with scripted_cluster(LAW, target=SLOW, wait_for_draft=False) as cluster:
        await until(lambda: cluster.coordinator._workers.draft is not None, "the draft is found")
        call = cluster.stub.Generate(request(), timeout=60)
        await anext(aiter(call))
        await until(lambda: cluster.draft.open_streams == 1, "the draft is at work")
        call.cancel()
        await until_free(cluster)
