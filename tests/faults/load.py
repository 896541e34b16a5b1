"""Eight streams at once through a real coordinator, and something that happens to them in mid-text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from tests.support.cluster import Reply
from tests.support.processes import Coordinator

STREAMS = 8
_UNDER_WAY = 10
_TIMEOUT_S = 200.0


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
