"""The target is lost in mid-text: another stream goes on with the same tokens, or the client is told in time.

The scripted law is the same in every process and pass, so a seed promises the tokens (design, "What a seed promises").
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import target_pb2
from services.common.rpc import server
from services.common.rpc.codec import encode_row
from services.common.rpc.errors import retry_after_s
from services.common.specdec.types import Row
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from tests.faults.waiting import recheck, until, until_free
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import TargetScript

PROMPT = [0, 1, 2, 3]
LAW = close_law(distance=0.5, seed=2)
REQUEST: dict[str, Any] = {"gamma": 2, "max_tokens": 30, "seed": 21}
STATUS = grpc.StatusCode


@pytest.fixture(scope="module")
def undisturbed() -> Reply:
    async def run() -> Reply:
        async with scripted_cluster(LAW) as cluster:
            return await cluster.generate(PROMPT, **REQUEST)

    return asyncio.run(run())


def check_same(reply: Reply, undisturbed: Reply) -> None:
    assert reply.tokens == undisturbed.tokens
    assert reply.origins == undisturbed.origins
    assert reply.text == undisturbed.text
    assert reply.result.speculation.degraded_rounds == 0


@pytest.mark.parametrize("request_number", [1, 2, 9])
@pytest.mark.parametrize(
    "code",
    [STATUS.UNAVAILABLE, STATUS.INTERNAL, STATUS.CANCELLED, STATUS.FAILED_PRECONDITION, STATUS.RESOURCE_EXHAUSTED],
)
async def test_a_stream_that_breaks(code: grpc.StatusCode, request_number: int, undisturbed: Reply) -> None:
    script = TargetScript(die_on={request_number}, die_as=code)
    async with scripted_cluster(LAW, target=script) as cluster:
        reply = await cluster.generate(PROMPT, **REQUEST)
        assert cluster.target.streams == 2
        # The new stream is told the whole sequence at once.
        assert cluster.target.requests == reply.result.speculation.rounds + 1
        await until_free(cluster)
    check_same(reply, undisturbed)


async def test_streams_that_break_one_after_the_other(undisturbed: Reply) -> None:
    script = TargetScript(die_on={1, 2, 3, 6, 7, 12})
    async with scripted_cluster(LAW, target=script) as cluster:
        reply = await cluster.generate(PROMPT, **REQUEST)
        assert cluster.target.streams == 7
    check_same(reply, undisturbed)


@pytest.mark.parametrize("request_number", [1, 5])
async def test_a_target_that_falls_silent(request_number: int, undisturbed: Reply) -> None:
    script = TargetScript(stall_on={request_number})
    # The time to find another begins when the first is given up.
    async with scripted_cluster(LAW, target=script, verify_timeout_s=3.0, target_retry_s=1.5) as cluster:
        reply = await cluster.generate(PROMPT, **REQUEST)
        assert cluster.target.streams == 2
        await until_free(cluster)
    check_same(reply, undisturbed)
    (waited,) = [row for row in reply.result.speculation.per_round if row.total_ms >= 3_000]
    assert waited.index == request_number - 1


async def test_a_server_that_vanishes_and_comes_back(undisturbed: Reply) -> None:
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.01)) as cluster, asyncio.TaskGroup() as group:
        answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
        await until(lambda: cluster.target.requests >= 4, "four rounds")
        await cluster.target.stop()
        assert not answer.done()
        await cluster.target.start()
    check_same(answer.result(), undisturbed)


async def test_a_roll_out_in_mid_text_waits_for_the_weights_that_it_began_with(undisturbed: Reply) -> None:
    """Another model in the target's place is refused: p never changes in mid-text."""
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.01)) as cluster, asyncio.TaskGroup() as group:
        answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
        await until(lambda: cluster.target.requests >= 4, "four rounds")
        await cluster.target.stop()
        cluster.target.info.identity.weights_hash = "other-weights"
        await cluster.target.start()
        refused = cluster.target.streams
        await until(lambda: cluster.target.streams >= refused + 2, "the other model is asked, twice")
        assert not answer.done()
        cluster.target.info.identity.weights_hash = "ScriptedTarget-1"
    check_same(answer.result(), undisturbed)


async def test_a_roll_out_that_stays_ends_the_request_and_serves_the_next() -> None:
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.01), target_retry_s=3.0) as cluster:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(failure(cluster))
            await until(lambda: cluster.target.requests >= 4, "four rounds")
            await cluster.target.stop()
            cluster.target.info.identity.weights_hash = "other-weights"
            await cluster.target.start()
        error = answer.result()
        assert error.code() is STATUS.UNAVAILABLE
        assert "another model" in (error.details() or "")
        recheck(cluster)
        workers = cluster.coordinator._workers
        await until(
            lambda: workers.target is not None and workers.target.info.identity.weights_hash == "other-weights",
            "the new target is found",
        )
        reply = await cluster.generate(PROMPT, **REQUEST)
    assert reply.result.target.weights_hash == "other-weights"


class Sends(TargetScript):
    """Sends something else in place of the answer to one request, then behaves."""

    def __init__(self, round_index: int, make: Callable[[Any, Any], Sequence[Any]]) -> None:
        super().__init__()
        self._at = round_index
        self._make = make
        self.done = False

    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        if request.round != self._at or self.done:
            return (reply,)
        self.done = True
        return self._make(request, reply)


def fewer_rows(_: Any, reply: Any) -> Sequence[Any]:
    del reply.rows[-1]
    return (reply,)


def more_rows(_: Any, reply: Any) -> Sequence[Any]:
    reply.rows.append(encode_row(Row.point_mass(0)))
    return (reply,)


def no_rows(request: Any, _: Any) -> Sequence[Any]:
    return (target_pb2.VerifyResponse(round=request.round),)


def stale_first(request: Any, reply: Any) -> Sequence[Any]:
    stale = target_pb2.VerifyResponse(round=request.round + 7, rows=[encode_row(Row.point_mass(0))] * len(reply.rows))
    return (stale, reply)


@pytest.mark.parametrize("round_index", [0, 4])
@pytest.mark.parametrize(
    "make",
    [fewer_rows, more_rows, no_rows, stale_first],
    ids=lambda make: make.__name__,
)
async def test_an_answer_that_cannot_be_used(
    make: Callable[[Any, Any], Sequence[Any]], round_index: int, undisturbed: Reply
) -> None:
    script = Sends(round_index, make)
    async with scripted_cluster(LAW, target=script) as cluster:
        reply = await cluster.generate(PROMPT, **REQUEST)
        assert cluster.target.streams == (1 if make is stale_first else 2)
    assert script.done
    check_same(reply, undisturbed)


class Forgets(TargetScript):
    """Forgets all but the first tokens before one round."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self._known = known

    def recall(self, tokens: list[int], request: Any) -> None:
        if request.round == 4 and request.base_length > 0:
            del tokens[self._known :]


@pytest.mark.parametrize("known", [0, 2, 7])
async def test_a_target_that_forgot_is_told_the_rest_on_the_same_stream(known: int, undisturbed: Reply) -> None:
    async with scripted_cluster(LAW, target=Forgets(known)) as cluster:
        reply = await cluster.generate(PROMPT, **REQUEST)
        assert cluster.target.streams == 1
        assert cluster.target.requests == reply.result.speculation.rounds + 1
    check_same(reply, undisturbed)


class KnowsNothingEver(TargetScript):
    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        return (target_pb2.VerifyResponse(round=request.round, known_length=0),)


async def test_a_target_that_never_learns_is_given_up() -> None:
    async with scripted_cluster(LAW, target=KnowsNothingEver(), target_retry_s=0.3) as cluster:
        error = await failure(cluster)
    assert error.code() is STATUS.UNAVAILABLE
    assert "0 rows came" in (error.details() or "")


async def failure(cluster: Cluster, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(PROMPT, **(REQUEST | fields))
    return caught.value


async def test_a_target_that_stays_away() -> None:
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.01), target_retry_s=0.5) as cluster:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(failure(cluster))
            await until(lambda: cluster.target.requests >= 4, "four rounds")
            began_s = time.monotonic()
            await cluster.target.stop()
        error = answer.result()
        assert time.monotonic() - began_s >= 0.5
        assert error.code() is STATUS.UNAVAILABLE
        assert "no target worker after" in (error.details() or "")
        assert "in 0.5 s" in (error.details() or "")
        # New requests try for themselves; a loss of the target does not flip the coordinator's readiness.
        assert (await failure(cluster)).code() is STATUS.UNAVAILABLE
        assert await health(cluster.channel) == health_pb2.HealthCheckResponse.SERVING
        await until(lambda: cluster.draft.open_streams == 0, "the draft is free")


async def test_a_full_target_is_asked_again_and_then_said_to_be_full() -> None:
    script = TargetScript(die_on=range(1, 10_000), die_as=STATUS.RESOURCE_EXHAUSTED)
    async with scripted_cluster(LAW, target=script, target_retry_s=2.0) as cluster:
        error = await failure(cluster)
        asked = cluster.target.requests
        cluster.target.script = TargetScript()
        assert (await cluster.generate(PROMPT, **REQUEST)).tokens
    assert error.code() is STATUS.RESOURCE_EXHAUSTED
    assert asked >= 3
    told_s = retry_after_s(error.trailing_metadata() or ())
    assert told_s is not None
    assert 0.1 <= told_s <= 60


@pytest.mark.parametrize("request_number", [1, 5])
async def test_a_full_target_is_left_for_another(request_number: int, undisturbed: Reply) -> None:
    full = TargetScript(die_on=range(request_number, 10_000), die_as=STATUS.RESOURCE_EXHAUSTED)
    async with scripted_cluster(LAW, spares=1) as cluster:
        (spare,) = cluster.spare_targets
        await spare.serve()
        cluster.target.script = full
        # Whichever is asked first: of two answers at least one begins at the full one.
        replies = [await cluster.generate(PROMPT, **REQUEST) for _ in range(2)]
        assert cluster.target.requests >= request_number
    for reply in replies:
        check_same(reply, undisturbed)


@pytest.mark.parametrize("which", [0, 1])
async def test_of_two_full_targets_the_one_that_has_room_again_is_found(which: int, undisturbed: Reply) -> None:
    """Whatever else is asked of them in between: attempts go to both in turn."""
    async with scripted_cluster(LAW, spares=1) as cluster:
        (spare,) = cluster.spare_targets
        await spare.serve()
        targets = (cluster.target, spare)
        for target in targets:
            target.script = TargetScript(die_on=range(1, 10_000), die_as=STATUS.RESOURCE_EXHAUSTED)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, **REQUEST))
            # So often that the coordinator asks who they are in every pause.
            await until(lambda: min(target.requests for target in targets) >= 3, "both have been asked")
            full, before = targets[1 - which], targets[1 - which].requests
            targets[which].script = TargetScript()
        assert full.requests <= before + 2
    check_same(answer.result(), undisturbed)


async def test_a_target_that_changes_before_the_first_round_is_planned_for_anew() -> None:
    """Another model takes over between the coordinator's last look and the first Verify: no waiting, no mixing."""
    async with scripted_cluster(LAW) as cluster:
        cluster.target.info.identity.weights_hash = "other-weights"
        cluster.target.info.eos_token_ids[:] = [2]
        began_s = time.monotonic()
        reply = await cluster.generate(PROMPT, **REQUEST | {"stop": pb.StopConditions(), "max_tokens": 400})
        took_s = time.monotonic() - began_s
        await until_free(cluster)
    assert reply.result.target.weights_hash == "other-weights"
    # What depends on the model is the new one's: its eos is 2, the first had none.
    assert reply.tokens[-1] == 2
    assert reply.result.finish_reason == pb.FINISH_REASON_EOS
    assert took_s < 10, "a lost target is looked for for 30 s"


async def test_a_prompt_that_the_new_target_cannot_take_is_refused_in_its_words() -> None:
    async with scripted_cluster(LAW) as cluster:
        cluster.target.info.identity.weights_hash = "other-weights"
        cluster.target.info.context_length = 5
        error = await failure(cluster)
    assert error.code() is STATUS.INVALID_ARGUMENT
    assert "max_tokens is 30: must be 1 to 1" in (error.details() or "")


@pytest.mark.parametrize("code", [STATUS.INVALID_ARGUMENT, STATUS.UNIMPLEMENTED])
async def test_what_no_other_attempt_can_mend_is_not_tried_again(code: grpc.StatusCode) -> None:
    async with scripted_cluster(LAW, target=TargetScript(die_on={3}, die_as=code)) as cluster:
        error = await failure(cluster, request_id="the-one")
        await until_free(cluster)
        assert cluster.target.streams == 1
    assert error.code() is STATUS.INTERNAL
    assert error.details() == "internal error; the log has it under request id the-one"


async def health(channel: grpc.aio.Channel) -> int:
    for service in ("", "paceline.v1.CoordinatorService"):
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(reply.status)


async def test_a_coordinator_without_a_target_is_not_ready_until_it_finds_one() -> None:
    async with scripted_cluster(LAW) as cluster:
        await cluster.target.stop()
        settings = CoordinatorSettings(
            listen="127.0.0.1:0", target=cluster.target.address, draft="", shutdown_grace_s=0
        )
        coordinator = Coordinator(settings)
        await coordinator.start()
        try:
            async with grpc.aio.insecure_channel(coordinator.address) as channel:
                late = Cluster(LAW, coordinator, cluster.draft, cluster.target, [], [], channel, _stub(channel))
                error = await failure(late)
                assert error.code() is STATUS.UNAVAILABLE
                assert f"no target worker found yet at {cluster.target.address}" in (error.details() or "")
                assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
                await cluster.target.start()
                await asyncio.wait_for(coordinator.wait_until_ready(), 20)
                assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
                assert len((await late.generate(PROMPT, **REQUEST)).tokens) == REQUEST["max_tokens"]
        finally:
            await coordinator.stop()


def _stub(channel: grpc.aio.Channel) -> Any:
    from paceline.v1 import coordinator_pb2_grpc

    return coordinator_pb2_grpc.CoordinatorServiceStub(channel)


@pytest.mark.parametrize("grace_s", [None, 0.1])
async def test_connections_of_an_age_are_closed_in_mid_text(
    grace_s: float | None, undisturbed: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grace running streams survive it, with one they are cut; the text is the same."""
    if grace_s is not None:
        # Nobody is offered this setting.
        grace = [("grpc.max_connection_age_grace_ms", int(grace_s * 1e3))]
        plain = server.keepalive_options
        monkeypatch.setattr(server, "keepalive_options", lambda keepalive_s: [*plain(keepalive_s), *grace])
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.05)) as cluster:
        await cluster.target.stop()
        cluster.target.settings = {"max_connection_age_s": 0.3}
        await cluster.target.start()
        reply = await cluster.generate(PROMPT, **REQUEST)
        streams = cluster.target.streams
    check_same(reply, undisturbed)
    assert streams == 1 if grace_s is None else streams >= 2
