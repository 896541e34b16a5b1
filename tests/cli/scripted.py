"""A coordinator that says what it was told to say, over real gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, worker_pb2

PIECES = (
    (11, pb.TOKEN_ORIGIN_ACCEPTED_DRAFT, "Blue"),
    (12, pb.TOKEN_ORIGIN_ACCEPTED_DRAFT, " light"),
    (13, pb.TOKEN_ORIGIN_RESIDUAL, " [b]scatters[/b]"),
    (14, pb.TOKEN_ORIGIN_BONUS, " \x1b[31mé"),
    (15, pb.TOKEN_ORIGIN_TARGET, ".\n"),
)
TEXT = "".join(text for _, _, text in PIECES)


def chunks() -> Iterator[pb.GenerateResponse]:
    """Yield the pieces, two tokens a chunk."""
    tokens = [pb.Token(id=token, origin=origin, text=text) for token, origin, text in PIECES]
    for start in range(0, len(tokens), 2):
        part = tokens[start : start + 2]
        yield pb.GenerateResponse(chunk=pb.TextChunk(text="".join(t.text for t in part), tokens=part))


def round_stats(index: int) -> pb.RoundStats:
    """Return a round of 100 ms: 10 of draft, 80 of verify, 5 of accept; the even ones have drafts."""
    drafted = index % 2 == 0
    return pb.RoundStats(
        index=index,
        gamma=4,
        proposed=4 if drafted else 0,
        tested=3 if drafted else 0,
        accepted=2 if drafted else 0,
        emitted=3 if drafted else 1,
        degraded=not drafted,
        start_ms=100.0 * index,
        total_ms=100.0,
        draft_ms=10.0,
        verify_ms=80.0,
        accept_ms=5.0,
        wire_ms=4.0,
        draft=worker_pb2.WorkerTiming(queue_ms=1.0, forward_ms=7.0, service_ms=8.0, forward_tokens=4),
        target=worker_pb2.WorkerTiming(
            queue_ms=20.0,
            forward_ms=58.0,
            service_ms=78.0,
            forward_tokens=5,
            worker_id="t-0",
            batch_size=3,
            reused_tokens=2,
            pass_tokens=9,
        ),
        q_bytes=2**33,
        p_bytes=20,
    )


def result(rounds: int = 2, **changes: Any) -> pb.GenerateResult:
    """Return the result that goes with the pieces."""
    per_round = [round_stats(index) for index in range(rounds)]
    tested, accepted = sum(r.tested for r in per_round), sum(r.accepted for r in per_round)
    values = {
        "request_id": "request-7",
        "finish_reason": pb.FINISH_REASON_LENGTH,
        "usage": pb.Usage(prompt_tokens=3, completion_tokens=len(PIECES)),
        "seed": 2**64 - 1,
        "gamma": 4,
        "verification": worker_pb2.VERIFICATION_COUPLED,
        "sampling": worker_pb2.SamplingParams(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0),
        "max_tokens": 5,
        "speculation": pb.SpeculationStats(
            rounds=rounds,
            proposed=sum(r.proposed for r in per_round),
            tested=tested,
            accepted=accepted,
            emitted=len(PIECES),
            alpha=accepted / tested if tested else 0.0,
            tokens_per_round=len(PIECES) / rounds if rounds else 0.0,
            degraded_rounds=sum(r.degraded for r in per_round),
            per_round=per_round,
        ),
        "prompt_token_ids": [1, 2, 3],
        **changes,
    }
    return pb.GenerateResult(**values)


@dataclass
class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers every request alike, and keeps what it was asked.

    Attributes:
        responses: What it sends.
        failure: How the call ends after them; None is well.
        endless: Say nothing more and wait to be cancelled.
    """

    responses: Sequence[pb.GenerateResponse] = ()
    failure: tuple[grpc.StatusCode, str] | None = None
    endless: bool = False
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    remaining_s: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        self.remaining_s = context.time_remaining()
        context.add_callback(self.cancelled.set)
        context.send_initial_metadata((("paceline-request-id", "request-7"),))
        yield from self.responses
        while self.endless and context.is_active():
            time.sleep(0.02)
        if self.failure:
            context.abort(*self.failure)


@contextmanager
def serving(coordinator: ScriptedCoordinator) -> Iterator[str]:
    """Serve on a free port and yield the address."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)
    healthy = health.HealthServicer()
    healthy.set("paceline.v1.CoordinatorService", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
