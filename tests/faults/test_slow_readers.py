"""A client that does not read: its own rounds stop, nobody else's, and what is written ahead of it is bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
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
LENGTH = 8_000


def request(**fields: object) -> pb.GenerateRequest:
    made = {"gamma": 0, "seed": 5, "max_tokens": LENGTH, "stop": pb.StopConditions(ignore_eos=True)}
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
        call = stub.Generate(request(), timeout=120)
        stopped = await until_it_stops(cluster)
        assert stopped > 1
        # Others go on, on the same server and with the same workers.
        assert len((await cluster.generate(PROMPT, max_tokens=50, gamma=0)).tokens) == 50
        assert cluster.target.requests == stopped + 50
        # It misses nothing by having waited.
        items = [item async for item in call]
        tokens = [token.id for item in items[:-1] for token in item.chunk.tokens]
        whole = await cluster.generate(PROMPT, max_tokens=LENGTH, gamma=0, seed=5)
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
    room_for_one = ("--max-sessions", "1", "--idle-timeout-s", "0.5")
    target = processes.target("--model", str(models / "target"), "--dtype", "float32", *room_for_one)
    coordinator = processes.coordinator(target, None)
    asked = {
        "text": "Once upon a time",
        "max_tokens": 3_000,
        "gamma": 0,
        "seed": 5,
        "sampling": worker_pb2.SamplingParams(temperature=1.0),
        "stop": pb.StopConditions(ignore_eos=True),
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
