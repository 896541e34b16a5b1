"""A client that does not read: its own rounds stop, nobody else's, and what is written ahead of it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, worker_pb2
from tests.faults.waiting import until_free
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.processes import Processes

PROMPT = [0, 1]
LAW = close_law(distance=0.5, seed=2)
# gRPC reads ahead of the client that uses it, by megabytes where the network is fast; this one reads ahead very little.
WINDOW_BYTES = 16_384
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
# A chunk of one letter is 20 bytes with its frame, and the server fills the client's window.
MOST_AHEAD = WINDOW_BYTES // 10
LENGTH = 3_000
PAST_EOS = pb.StopConditions(ignore_eos=True)


def request(**fields: object) -> pb.GenerateRequest:
    token = worker_pb2.VERIFICATION_TOKEN
    made = {"gamma": 0, "seed": 5, "verification": token, "max_tokens": LENGTH, "stop": PAST_EOS}
    return pb.GenerateRequest(tokens=pb.TokenPrompt(ids=PROMPT), **(made | fields))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def slow_reader(cluster: Cluster) -> AsyncIterator[coordinator_pb2_grpc.CoordinatorServiceAsyncStub]:
    async with grpc.aio.insecure_channel(cluster.coordinator.address, options=SMALL_WINDOW) as channel:
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)


async def until_it_stops(cluster: Cluster) -> int:
    """Wait until no round has been run for a while, though nothing is slow but the client; return how many were."""
    seen, still = -1, 0
    while still < 20:
        await asyncio.sleep(0.02)
        still = still + 1 if cluster.target.requests == seen else 0
        seen = cluster.target.requests
        assert seen <= MOST_AHEAD, "rounds run on though nobody reads"
    return seen


async def test_a_client_that_does_not_read_stops_its_own_rounds_only() -> None:
    async with scripted_cluster(LAW, context_length=LENGTH + 100) as cluster, slow_reader(cluster) as stub:
        call = stub.Generate(request(), timeout=240)
        stopped = await until_it_stops(cluster)
        assert stopped > 1
        # Others go on, on the same server and with the same workers.
        assert len((await cluster.generate(PROMPT, max_tokens=50, gamma=0)).tokens) == 50
        assert cluster.target.requests == stopped + 50
        # It misses nothing by having waited.
        items = [item async for item in call]
        tokens = [token.id for item in items[:-1] for token in item.chunk.tokens]
        whole = await cluster.generate(PROMPT, max_tokens=LENGTH, gamma=0, seed=5, timeout_s=240)
    assert tokens == whole.tokens
    assert len(tokens) == LENGTH


async def test_a_client_that_never_reads_is_freed_by_its_deadline() -> None:
    async with (
        scripted_cluster(LAW, context_length=LENGTH + 100, default_deadline_s=1.0, wait_for_draft=False) as cluster,
        slow_reader(cluster) as stub,
    ):
        call = stub.Generate(request())
        await until_it_stops(cluster)
        await until_free(cluster)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
def test_the_cache_of_a_session_that_waits_for_its_reader_is_lent_to_others(processes: Processes, models: Path) -> None:
    """The only room at the target: idle it is given back, and the text goes on as if nothing had happened."""
    # A slow machine needs many seconds to fill the client's window, and only then does the first one wait.
    room_for_one = ("--max-sessions", "1", "--idle-timeout-s", "0.5", "--session-wait-s", "100")
    target = processes.target("--model", str(models / "target"), "--dtype", "float32", *room_for_one)
    coordinator = processes.coordinator(target, None)
    asked = {
        "text": "Once upon a time",
        "max_tokens": 3_000,
        "gamma": 0,
        "seed": 5,
        "sampling": worker_pb2.SamplingParams(temperature=1.0),
        "stop": PAST_EOS,
    }
    with grpc.insecure_channel(coordinator.address, options=SMALL_WINDOW) as channel:
        call = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(pb.GenerateRequest(**asked), timeout=200)
        first = next(iter(call))
        # Refused, or stuck behind the other, as long as that one holds its cache.
        assert len(coordinator.generate(**asked | {"max_tokens": 20}).tokens) == 20
        items = [first, *call]
    tokens = [token.id for item in items[:-1] for token in item.chunk.tokens]
    assert "lost" not in coordinator.log
    assert tokens == coordinator.generate(**asked).tokens


@pytest.mark.slow
async def test_clients_that_read_nothing_cost_the_coordinator_no_memory(processes: Processes, models: Path) -> None:
    """Four of them, with answers of 2,000 tokens: their rounds stop, and others are served meanwhile."""
    target = processes.target("--model", str(models / "target"), "--dtype", "float32", "--max-sessions", "8")
    coordinator = processes.coordinator(target, None)

    def others() -> float:
        """Have whole answers and return the coordinator's memory after them, in MiB."""
        for seed in range(5):
            reply = coordinator.generate(text="Once upon a time", max_tokens=60, seed=seed, gamma=0, stop=PAST_EOS)
            assert len(reply.tokens) == 60
        return float(psutil.Process(coordinator.pid).memory_info().rss) / 2**20

    asked = pb.GenerateRequest(text="Once upon a time", max_tokens=2_000, gamma=0, seed=5, stop=PAST_EOS)
    async with contextlib.AsyncExitStack() as stack:
        before = await asyncio.to_thread(others)
        began_s = time.monotonic()
        calls = []
        for _ in range(4):
            channel = grpc.aio.insecure_channel(coordinator.address, options=SMALL_WINDOW)
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(await stack.enter_async_context(channel))
            calls.append(stub.Generate(asked, timeout=200))
        during = [await asyncio.to_thread(others) for _ in range(4)]
        waited_ms = (time.monotonic() - began_s) * 1e3
        # They have not been forgotten: each gets the whole of its answer now.
        results = [[item async for item in call][-1].result for call in calls]
    assert [result.usage.completion_tokens for result in results] == [2_000] * 4
    ahead = [sum(row.start_ms < waited_ms for row in result.speculation.per_round) for result in results]
    print(
        f"{before:.1f} MiB before, {[round(mib, 1) for mib in during]} with four that read nothing",
        f"{ahead} rounds ahead of them",
    )
    assert max(ahead) <= MOST_AHEAD
    assert max(during) < before + 8
