"""Eight streams at once through a real coordinator, and something that happens to them in mid-text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from tests.support.cluster import Reply
from tests.support.processes import Coordinator, Service

STREAMS = 8
_UNDER_WAY = 10
_TIMEOUT_S = 600.0


def requests(**fields: Any) -> list[pb.GenerateRequest]:
    """Return a request for each stream, each with a prompt and a seed of its own."""
    common = {"gamma": 3, "stop": pb.StopConditions(ignore_eos=True)}
    return [
        pb.GenerateRequest(text=f"Story {n}. Once upon a time", seed=n, **(common | fields)) for n in range(STREAMS)
    ]


def under_load(
    coordinator: Coordinator, asked: Sequence[pb.GenerateRequest], disturb: Callable[[], None] = lambda: None
) -> list[Reply]:
    """Generate all answers at once, and disturb them as soon as each has ten tokens.

    Raises:
        grpc.RpcError: One of the streams failed.
    """
    under_way = [threading.Event() for _ in asked]
    with coordinator.connected() as stub, ThreadPoolExecutor(len(asked)) as threads:
        running = [
            threads.submit(_generate, stub, request, ready) for request, ready in zip(asked, under_way, strict=True)
        ]
        for ready in under_way:
            assert ready.wait(_TIMEOUT_S)
        disturb()
        return [reply.result() for reply in running]


def as_long_as(
    coordinator: Coordinator, asked: Sequence[pb.GenerateRequest], disturb: Callable[[], None]
) -> list[list[int]]:
    """Generate until a disturbance is over, and a little longer; return the tokens of each answer, not the whole of it.

    Raises:
        grpc.RpcError: One of the streams failed.
    """
    under_way, over = threading.Barrier(len(asked) + 1), threading.Event()

    def tokens(stub: coordinator_pb2_grpc.CoordinatorServiceStub, request: pb.GenerateRequest) -> list[int]:
        call = stub.Generate(request, timeout=_TIMEOUT_S)
        seen = [token.id for token in next(iter(call)).chunk.tokens]
        under_way.wait(_TIMEOUT_S)
        for item in call:
            more = over.is_set()
            seen += [token.id for token in item.chunk.tokens]
            if more:
                break
        call.cancel()
        return seen

    with coordinator.connected() as stub, ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(tokens, stub, request) for request in asked]
        under_way.wait(_TIMEOUT_S)
        try:
            disturb()
        finally:
            over.set()
        return [answer.result() for answer in running]


def check_same(replies: Sequence[Reply], undisturbed: Sequence[Reply]) -> None:
    """Check that the answers are the same, token for token."""
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in undisturbed]
    assert [reply.text for reply in replies] == [reply.text for reply in undisturbed]


def name(workers: Sequence[Service]) -> str:
    """Return the gRPC name of several workers together."""
    return f"ipv4:{','.join(worker.address for worker in workers)}"


def back(worker: Service) -> None:
    """Start a worker again, and wait until it serves."""
    worker.restart()
    worker.wait_until_serving()


def lost(coordinator: Coordinator, which: str) -> int:
    """Return how many sessions at a kind of worker have been lost so far."""
    return coordinator.log.count(f"{which} lost")


def _generate(
    stub: coordinator_pb2_grpc.CoordinatorServiceStub, request: pb.GenerateRequest, under_way: threading.Event
) -> Reply:
    chunks: list[pb.TextChunk] = []
    result, seen = None, 0
    try:
        for item in stub.Generate(request, timeout=_TIMEOUT_S):
            if item.HasField("result"):
                result = item.result
                continue
            chunks.append(item.chunk)
            seen += len(item.chunk.tokens)
            if seen >= _UNDER_WAY:
                under_way.set()
    finally:
        # Whoever waits for a stream that failed should not wait for ever.
        under_way.set()
    assert result is not None
    return Reply(tuple(chunks), result)
