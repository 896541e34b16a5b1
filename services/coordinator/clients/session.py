"""What sessions at both kinds of worker have in common: how they open, where they stand, what a call cost."""

from __future__ import annotations

from typing import Generic

from paceline.v1 import worker_pb2
from services.common.rpc.codec import encode_sampling, encode_verification
from services.common.rpc.stream import Reply, Request, Stream
from services.common.specdec.sequence import RemoteSequence
from services.coordinator.types import Call, Plan

_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0


def session_start(plan: Plan, identity: worker_pb2.ModelIdentity | None = None) -> worker_pb2.SessionStart:
    """Return the message that opens a worker's session for a request."""
    return worker_pb2.SessionStart(
        request_id=plan.request_id,
        sampling=encode_sampling(plan.params),
        seed=plan.seed,
        prompt_length=len(plan.prompt),
        max_new_tokens=plan.max_tokens,
        identity=identity,
        verification=encode_verification(plan.verification),
    )


class Backoff:
    """Doubling waits between attempts, starting over after a success."""

    def __init__(self) -> None:
        self._next_s = _RETRY_FIRST_S

    def step(self) -> float:
        """Return the wait before the next attempt."""
        wait, self._next_s = self._next_s, min(2 * self._next_s, _RETRY_MOST_S)
        return wait

    def reset(self) -> None:
        """Start over."""
        self._next_s = _RETRY_FIRST_S


class Line(Generic[Request, Reply]):
    """One stream with one worker.

    Attributes:
        stream: The stream.
        start: Opens the session: what the first request has to carry, None once it has.
        remote: What the worker knows of the text.
        draining: The worker has said that it is going to stop.
        features_end: One past the last position whose features a draft has been given; None where it has none.
    """

    def __init__(self, stream: Stream[Request, Reply], start: worker_pb2.SessionStart) -> None:
        self.stream = stream
        self.start: worker_pb2.SessionStart | None = start
        self.remote = RemoteSequence()
        self.draining = False
        self.features_end: int | None = None

    async def close(self) -> None:
        """Free the session, at the worker too."""
        await self.stream.close()


def call_of(timing: worker_pb2.WorkerTiming, elapsed_s: float, row_bytes: int, model_id: str) -> Call:
    """Return what a call cost, as seen from here and by the worker's own clock."""
    return Call(
        elapsed_s=elapsed_s,
        queue_s=timing.queue_ms / 1e3,
        forward_s=timing.forward_ms / 1e3,
        service_s=timing.service_ms / 1e3,
        forward_tokens=timing.forward_tokens,
        row_bytes=row_bytes,
        model=model_id,
        worker=timing.worker_id,
        batch_size=timing.batch_size,
        reused_tokens=timing.reused_tokens,
        pass_tokens=timing.pass_tokens,
    )
