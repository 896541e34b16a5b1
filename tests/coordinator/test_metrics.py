"""What the coordinator counts agrees with what clients are told, and with what workers were made to do."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.faults.waiting import until
from tests.support.cluster import Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.metrics import Readings
from tests.support.scripts import BadRow, DraftScript, TargetScript

LAW = close_law(distance=0.5, seed=2)
PROMPT = [0, 1]


async def answer(readings: Readings, draft: DraftScript | None = None, target: TargetScript | None = None) -> Reply:
    """Return the one answer of a coordinator."""
    async with scripted_cluster(LAW, draft=draft, target=target, meter=readings.meter) as cluster:
        # The cluster has asked for the draft by rounds of its own.
        before = {name: readings.total(f"paceline.{name}") for name in ("tokens.tested", "tokens.accepted", "rounds")}
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=40)
        stats = reply.result.speculation
        for name, told in (
            ("tokens.tested", stats.tested),
            ("tokens.accepted", stats.accepted),
            ("rounds", stats.rounds),
        ):
            assert readings.total(f"paceline.{name}") - before[name] == told
        return reply


async def test_alpha_by_position_is_alpha() -> None:
    readings = Readings()
    async with scripted_cluster(LAW, meter=readings.meter, wait_for_draft=False) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=60)
    rounds = reply.result.speculation.per_round
    for name, counts in (
        ("tested", Counter(i for done in rounds for i in range(done.tested))),
        ("accepted", Counter(i for done in rounds for i in range(done.accepted))),
    ):
        assert readings.values(f"paceline.tokens.{name}_per_position") == {(i,): n for i, n in counts.items()}
        assert readings.total(f"paceline.tokens.{name}") == counts.total() > 0
    assert readings.total("paceline.tokens.asked") == sum(done.gamma for done in rounds)
    assert readings.total("paceline.tokens.prompt") == len(PROMPT)


async def test_the_time_of_a_call_is_that_of_its_parts() -> None:
    readings = Readings()
    reply = await answer(readings)
    calls = readings.values("paceline.calls")
    rounds = reply.result.speculation.per_round
    assert calls["target",] >= len(rounds)
    parts = readings.values("paceline.call.time")
    assert {worker for worker, _ in parts} == {"draft", "target"}
    target_s = sum(seconds for (worker, _), seconds in parts.items() if worker == "target")
    assert target_s >= sum(done.verify_ms for done in rounds) / 1e3


async def test_bytes_are_counted_both_ways() -> None:
    readings = Readings()
    reply = await answer(readings)
    payload = readings.values("paceline.payload.io")
    rounds = reply.result.speculation.per_round
    assert payload["target", "received"] > sum(done.p_bytes for done in rounds) > 0
    assert payload["draft", "received"] > sum(done.q_bytes for done in rounds) > 0
    # Tokens and what opens a session, no rows.
    assert 0 < payload["draft", "sent"] < payload["draft", "received"]
    assert payload["target", "sent"] > 0


async def test_a_bad_row_of_the_draft_is_counted() -> None:
    readings = Readings()
    reply = await answer(readings, DraftScript(bad_q=BadRow.NAN, bad_q_at=1))
    degraded = reply.result.speculation.degraded_rounds
    assert readings.values("paceline.rows.bad") == {("draft",): degraded, ("target",): 0}
    assert readings.values("paceline.rounds.degraded")["bad row",] == degraded > 0


async def test_a_bad_row_of_the_target_is_counted_with_the_request_that_it_ends() -> None:
    readings = Readings()
    with pytest.raises(grpc.aio.AioRpcError):
        await answer(readings, target=TargetScript(bad_p=BadRow.NAN))
    assert readings.values("paceline.rows.bad") == {("draft",): 0, ("target",): 1}
    assert readings.values("paceline.requests.ended")["INTERNAL",] == 1


async def test_a_lost_stream_and_the_attempt_after_it_are_counted() -> None:
    readings = Readings()
    await answer(readings, target=TargetScript(die_on={2, 3}, die_as=grpc.StatusCode.RESOURCE_EXHAUSTED))
    lost = readings.values("paceline.workers.lost")
    assert lost == {("draft", "UNAVAILABLE"): 0, ("target", "UNAVAILABLE"): 0, ("target", "RESOURCE_EXHAUSTED"): 2}
    assert readings.total("paceline.verify.retries") == 2


async def test_nothing_is_missing_before_it_happens() -> None:
    """To Prometheus a counter that appears as 1 has not increased."""
    readings = Readings()
    async with scripted_cluster(LAW, meter=readings.meter, wait_for_draft=False):
        for name in (
            "rows.bad",
            "workers.lost",
            "rounds.degraded",
            "requests.ended",
            "verify.retries",
            "tokens.tested",
        ):
            values = readings.values(f"paceline.{name}")
            assert values, name
            assert set(values.values()) == {0}, name


async def test_requests_wait_run_and_end() -> None:
    readings = Readings()

    def gauged() -> list[float]:
        return [readings.total(f"paceline.requests.{name}") for name in ("running", "waiting", "limit")]

    request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), max_tokens=4000, stop={"ignore_eos": True})
    script = TargetScript(late_s=0.02)
    async with scripted_cluster(
        LAW, target=script, meter=readings.meter, max_requests=1, wait_for_draft=False
    ) as cluster:
        call = cluster.stub.Generate(request, timeout=60)
        await until(lambda: gauged() == [1, 1, 1], "it waits for its first token")
        await anext(aiter(call))
        assert gauged() == [1, 0, 1]
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in cluster.stub.Generate(request, timeout=60)]
        call.cancel()
        await until(lambda: gauged() == [0, 0, 1], "it has ended")
        await cluster.generate(PROMPT, gamma=2, max_tokens=20)
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(PROMPT, gamma=2, max_tokens=0)
    ended = {status: count for (status,), count in readings.values("paceline.requests.ended").items() if count}
    assert ended == {"OK": 1, "RESOURCE_EXHAUSTED": 1, "CANCELLED": 1, "INVALID_ARGUMENT": 1}
    durations = readings.points("gen_ai.server.request.duration")
    assert {labels[-1]: point.count for labels, point in durations.items() if labels[-1] in ended} == {
        "RESOURCE_EXHAUSTED": 1,
        "CANCELLED": 1,
        "INVALID_ARGUMENT": 1,
    }
    (first,) = readings.points("gen_ai.server.time_to_first_token").values()
    assert first.count == 2
    assert first.attributes["gen_ai.operation.name"] == "text_completion"
    (each,) = readings.points("gen_ai.server.time_per_output_token").values()
    # The one that was cancelled may have had a second token.
    assert 1 <= each.count <= 2


async def test_a_draft_that_is_gone_is_no_longer_found() -> None:
    readings = Readings()

    def found() -> dict[tuple[str, ...], float]:
        return readings.values("paceline.workers.found")

    async with scripted_cluster(LAW, meter=readings.meter) as cluster:
        assert found() == {("target",): 1, ("draft",): 1}
        await cluster.draft.stop()
        # A round notices, and has the workers asked again.
        await cluster.generate(PROMPT, gamma=2, max_tokens=8)
        await until(lambda: found() == {("target",): 1, ("draft",): 0}, "the draft is missed")
    readings = Readings()
    async with scripted_cluster(LAW, meter=readings.meter, draft_address="", wait_for_draft=False):
        assert found() == {("target",): 1}


async def test_what_the_tokens_would_have_taken_alone() -> None:
    """A target that takes its time over a pass, and drafts that are all but free: alone it would have taken longer."""
    readings = Readings()
    script = TargetScript(late_s=0.05)
    async with scripted_cluster(close_law(distance=0.1, seed=2), target=script, meter=readings.meter) as cluster:
        for _ in range(3):
            reply = await cluster.generate(PROMPT, seed=None, max_tokens=80)
    time = readings.values("paceline.speculation.time")
    assert reply.result.adaptive_gamma
    assert time["alone",] > 1.5 * time["spent",] > 0
    assert time["spent",] < 60
