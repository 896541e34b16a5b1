"""What the two workers' gRPC adapters have in common: the session's identity, its clock, its spans."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from opentelemetry import trace

from paceline.v1 import worker_pb2
from services.common.rpc import telemetry
from services.common.rpc.codec import decode_sampling
from services.common.specdec.errors import InvalidFieldError, WrongModelError
from services.common.specdec.types import SamplingParams

_tracer = trace.get_tracer("paceline.worker")


class Timing(Protocol):
    """What an engine says of one request."""

    @property
    def queue_s(self) -> float:
        """Waiting for the device."""
        ...

    @property
    def forward_s(self) -> float:
        """In forward passes."""
        ...

    @property
    def forward_tokens(self) -> int:
        """Positions fed to the model."""
        ...

    @property
    def batch_size(self) -> int:
        """Sessions in the largest pass that the request shared."""
        ...

    @property
    def reused_tokens(self) -> int:
        """Positions of the prompt taken from another session's cache."""
        ...


class Received:
    """One request of a session, from its arrival to its reply."""

    def __init__(self, message: telemetry.Traced) -> None:
        self._message = message
        self._arrived_s = time.perf_counter()
        self._arrived_ns = time.time_ns()

    def timing(self, timing: Timing, worker_id: str) -> worker_pb2.WorkerTiming:
        """Return the reply's timing; the time in the worker altogether ends now."""
        return worker_pb2.WorkerTiming(
            queue_ms=timing.queue_s * 1e3,
            forward_ms=timing.forward_s * 1e3,
            service_ms=(time.perf_counter() - self._arrived_s) * 1e3,
            forward_tokens=timing.forward_tokens,
            worker_id=worker_id,
            batch_size=timing.batch_size,
            reused_tokens=timing.reused_tokens,
        )

    def trace(self, timing: Timing, attributes: Mapping[str, str | int]) -> None:
        """Record the queue and the forward passes as spans of the request's trace, if it has one."""
        if not self._message.traceparent:
            return
        context = telemetry.extract(self._message)
        queued_ns = self._arrived_ns + int(timing.queue_s * 1e9)
        done_ns = queued_ns + int(timing.forward_s * 1e9)
        queue = _tracer.start_span("paceline.queue", context, attributes=attributes, start_time=self._arrived_ns)
        queue.end(queued_ns)
        forward = _tracer.start_span("paceline.forward", context, attributes=attributes, start_time=queued_ns)
        forward.set_attribute("paceline.forward.tokens", timing.forward_tokens)
        forward.end(done_ns)


def open_session(start: worker_pb2.SessionStart, has_start: bool, ours: worker_pb2.ModelIdentity) -> SamplingParams:
    """Check the message that opens a session and return its sampling parameters.

    Raises:
        InvalidFieldError: No session start, or sampling parameters out of range.
        WrongModelError: The request began with other weights.
    """
    if not has_start:
        raise InvalidFieldError("start", "unset", "set in the first message of a stream")
    if start.identity != ours:
        raise WrongModelError(
            f"the request began with {_shown(start.identity)}, this worker serves {_shown(ours)}: try another"
        )
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if not start.sampling.HasField(name):
            raise InvalidFieldError(f"start.sampling.{name}", "unset", "set")
    return decode_sampling(start.sampling, SamplingParams())


def _shown(identity: worker_pb2.ModelIdentity) -> str:
    return f"{identity.model_id or 'no model'} {identity.dtype} {identity.weights_hash[:12]}".strip()
