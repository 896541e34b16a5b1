"""What the two workers' gRPC adapters have in common: the session's identity, its clock, its spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Generic, Literal, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from opentelemetry import trace
from opentelemetry.trace import Link

from paceline.v1 import worker_pb2
from services.common.rpc import telemetry
from services.common.rpc.call import current_call
from services.common.rpc.codec import decode_sampling, decode_verification
from services.common.rpc.errors import Context, RpcError
from services.common.specdec.errors import CapacityError, InvalidFieldError, WrongModelError
from services.common.specdec.types import SamplingParams, VerificationMode

# A coordinator sends one request after the other; what it sends on top of these waits in its own buffers.
READ_AHEAD = 4
# What workers receive is token ids: a million of them is more than any context.
RECEIVE_MIB = 8
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

    @property
    def pass_tokens(self) -> int:
        """Positions in that largest pass, those of all its sessions together."""
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
            pass_tokens=timing.pass_tokens,
        )

    def trace(self, timing: Timing, attributes: Mapping[str, str | int]) -> None:
        """Record the queue and the forward passes as spans of the request's trace, if it is sampled."""
        call = current_call()
        if call is None or not call.is_sampled:
            return
        context = telemetry.extract(self._message)
        queued_ns = self._arrived_ns + int(timing.queue_s * 1e9)
        done_ns = queued_ns + int(timing.forward_s * 1e9)
        queue = _tracer.start_span("paceline.queue", context, attributes=attributes, start_time=self._arrived_ns)
        queue.end(queued_ns)
        forward = _tracer.start_span(
            "paceline.forward",
            context,
            attributes=attributes,
            links=[Link(each) for each in call.passes],
            start_time=queued_ns,
        )
        forward.set_attributes(
            {
                "paceline.forward.tokens": timing.forward_tokens,
                "paceline.forward.batch_size": timing.batch_size,
                "paceline.forward.reused_tokens": timing.reused_tokens,
            }
        )
        forward.end(done_ns)


class SessionRequest(telemetry.Traced, Protocol):
    """A request of a session; the first one opens it."""

    @property
    def start(self) -> worker_pb2.SessionStart:
        """What opens it."""
        ...

    def HasField(self, field_name: Literal["start"]) -> bool:  # noqa: N802
        """Return whether it opens one."""
        ...


R = TypeVar("R", bound=SessionRequest)


class Closeable(Protocol):
    """A session at the engine."""

    def close(self) -> None:
        """Free what it holds. May be called again."""
        ...


S = TypeVar("S", bound=Closeable)


class StreamSession(Generic[S]):
    """A stream's session at the engine: opened by a request, given back while the stream is idle and when it ends."""

    def __init__(self, open_session: Callable[[worker_pb2.SessionStart], Awaitable[S]]) -> None:
        self._open = open_session
        self._start: worker_pb2.SessionStart | None = None
        self._session: S | None = None

    async def session(self, request: SessionRequest) -> S:
        """Return the session, opened anew where it has been given back; it then knows nothing of the text.

        Raises:
            InvalidFieldError: The first request of the stream does not say how to open it, or a later one does again.
        """
        if self._start is not None and request.HasField("start"):
            # What it asks for now is not what it would get.
            raise InvalidFieldError("start", "set again", "set in the first message of a stream only")
        if self._session is None:
            if request.HasField("start"):
                self._start = worker_pb2.SessionStart()
                self._start.CopyFrom(request.start)
            if self._start is None:
                raise InvalidFieldError("start", "unset", "set in the first message of a stream")
            self._session = await self._open(self._start)
        return self._session

    def close(self) -> None:
        """Give the session back. May be called again."""
        if self._session is not None:
            self._session.close()
            self._session = None


class Streams:
    """Counts the streams of a worker. Sessions are fewer: a stream that is idle has none."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open = 0

    def __enter__(self) -> None:
        """Count a stream in.

        Raises:
            CapacityError: `limit` streams are open.
        """
        if self._open >= self._limit:
            raise CapacityError(f"{self._limit} streams are open at this worker, the limit (--max-streams)")
        self._open += 1

    def __exit__(self, *_: object) -> None:
        """Count it out."""
        self._open -= 1


class Inbox(Generic[R]):
    """A stream's requests in order, a few of them read ahead, so that waiting for one can be given up.

    `async with` it: a task reads.
    """

    def __init__(self, requests: AsyncIterator[R], idle_timeout_s: float, on_idle: Callable[[], None]) -> None:
        """Begin with the `async with`.

        Args:
            requests: The stream.
            idle_timeout_s: How long a stream may be silent,
            on_idle: and what is done then; the stream goes on, unless it has never asked for anything.
        """
        self._requests = requests
        self._idle_timeout_s = idle_timeout_s
        self._on_idle = on_idle
        self._arrived: asyncio.Queue[tuple[R, Received] | RpcError | None] = asyncio.Queue()
        self._has_begun = False
        self._has_ended = False
        self._room = asyncio.Semaphore(READ_AHEAD)

    async def __aenter__(self) -> Inbox[R]:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no other request has come yet. The end of a stream is none: what came before it is answered."""
        return self._arrived.qsize() <= self._has_ended

    def __aiter__(self) -> Inbox[R]:
        return self

    async def __anext__(self) -> tuple[R, Received]:
        item = await self._next()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, RpcError):
            raise item
        self._has_begun = True
        self._room.release()
        return item

    async def _next(self) -> tuple[R, Received] | RpcError | None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await self._arrived.get()
        except TimeoutError:
            if not self._has_begun:
                told = f"nothing was asked within {self._idle_timeout_s:g} s (--idle-timeout-s)"
                raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, told) from None
            self._on_idle()
        return await self._arrived.get()

    async def _read(self) -> None:
        end: RpcError | None = None
        try:
            await self._room.acquire()
            async for request in self._requests:
                self._arrived.put_nowait((request, Received(request)))
                await self._room.acquire()
        except DecodeError:
            end = RpcError(grpc.StatusCode.INVALID_ARGUMENT, "a message of the stream cannot be decoded")
        finally:
            self._has_ended = True
            self._arrived.put_nowait(end)


async def send(context: Context, reply: Message, timeout_s: float) -> None:
    """Send a reply.

    Raises:
        RpcError: DEADLINE_EXCEEDED, the peer has taken nothing in for `timeout_s`: its session is wanted by others.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(reply)
    except TimeoutError:
        told = f"a reply was not taken in within {timeout_s:g} s (--idle-timeout-s)"
        raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, told) from None


def open_session(
    start: worker_pb2.SessionStart, ours: worker_pb2.ModelIdentity
) -> tuple[SamplingParams, VerificationMode]:
    """Check the message that opens a session and return its sampling parameters and its rule.

    Raises:
        InvalidFieldError: Sampling parameters unset or out of range, or a rule that there is not.
        WrongModelError: The request began with other weights.
    """
    if start.identity != ours:
        raise WrongModelError(
            f"the request began with {_shown(start.identity)}, this worker serves {_shown(ours)}: try another"
        )
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if not start.sampling.HasField(name):
            raise InvalidFieldError(f"start.sampling.{name}", "unset", "set")
    rule = decode_verification("start.verification", start.verification, VerificationMode.TOKEN)
    return decode_sampling(start.sampling, SamplingParams()), rule


def _shown(identity: worker_pb2.ModelIdentity) -> str:
    return f"{identity.model_id or 'no model'} {identity.dtype} {identity.weights_hash[:12]}".strip()
