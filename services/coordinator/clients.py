"""Drafter and verifier over gRPC: a session is a stream, and a lost stream is opened again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from opentelemetry.trace import Span

from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from services.common.rpc import telemetry
from services.common.rpc.codec import decode_row, encode_sampling
from services.common.rpc.stream import Stream, StreamLostError
from services.common.specdec.sequence import RemoteSequence
from services.common.specdec.types import Draft, Row
from services.coordinator.ports import Proposal, TargetFullError, TargetUnavailableError, Verification
from services.coordinator.types import Call, Plan

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 1.0
# Statuses that another attempt, perhaps on another pod, cannot mend.
_HOPELESS = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED})


def session_start(plan: Plan, identity: worker_pb2.ModelIdentity | None = None) -> worker_pb2.SessionStart:
    """Return the message that opens a worker's session for a request."""
    return worker_pb2.SessionStart(
        request_id=plan.request_id,
        sampling=encode_sampling(plan.params),
        seed=plan.seed,
        prompt_length=len(plan.prompt),
        max_new_tokens=plan.max_tokens,
        identity=identity,
    )


@dataclass
class Backoff:
    """Doubling waits between attempts, starting over after a success."""

    next_s: float = _RETRY_FIRST_S

    def step(self) -> float:
        """Return the wait before the next attempt."""
        wait, self.next_s = self.next_s, min(2 * self.next_s, _RETRY_MOST_S)
        return wait

    def reset(self) -> None:
        """Start over."""
        self.next_s = _RETRY_FIRST_S


class TargetSession:
    """A `Verifier` over gRPC: one stream at a time, opened again wherever it is lost."""

    def __init__(
        self,
        stub: target_pb2_grpc.TargetServiceAsyncStub,
        start: worker_pb2.SessionStart,
        *,
        verify_timeout_s: float,
        retry_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        """Make a session; the stream is opened by the first verify.

        Args:
            stub: The target workers.
            start: Opens the session at a worker.
            verify_timeout_s: A worker silent for this long is given up.
            retry_s: How long a lost target is looked for.
            on_lost: Told of every lost stream.
        """
        self._stub = stub
        self._start = start
        self._verify_timeout_s = verify_timeout_s
        self._retry_s = retry_s
        self._on_lost = on_lost
        self._stream: Stream[target_pb2.VerifyRequest, target_pb2.VerifyResponse] | None = None
        self._remote = RemoteSequence()

    async def verify(
        self, round_index: int, committed: Sequence[int], drafts: Sequence[int], span: Span
    ) -> Verification:
        """Return p after `committed` and after each draft, from this worker or, if it is lost, from another.

        Raises:
            TargetUnavailableError: No worker could be had within `retry_s`; a TargetFullError where there were workers.
        """
        started_s = time.perf_counter()
        backoff = Backoff()
        give_up_s: float | None = None
        attempts = 0
        while True:
            attempts += 1
            try:
                rows, timing = await self._attempt(round_index, committed, drafts, span)
                elapsed_s = time.perf_counter() - started_s
                return Verification(rows, _call(timing, elapsed_s, sum(row.nbytes for row in rows), self._start))
            except StreamLostError as lost:
                await self._drop(lost)
                span.set_attribute("paceline.retries", attempts)
                if lost.code in _HOPELESS:
                    raise RuntimeError(f"the target refuses what the coordinator sends: {lost}") from lost
                # From the loss on: a target that was silent for longer than this deserves another attempt too.
                if give_up_s is None:
                    give_up_s = time.monotonic() + self._retry_s
                if time.monotonic() >= give_up_s:
                    full = lost.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                    kind = TargetFullError if full else TargetUnavailableError
                    raise kind(f"no target worker after {attempts} attempts in {self._retry_s:g} s: {lost}") from lost
            await asyncio.sleep(backoff.step())

    async def close(self) -> None:
        """Free the session, at the worker too."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None

    async def _attempt(
        self, round_index: int, committed: Sequence[int], drafts: Sequence[int], span: Span
    ) -> tuple[tuple[Row, ...], worker_pb2.WorkerTiming]:
        request = target_pb2.VerifyRequest(round=round_index, rows=len(drafts) + 1)
        telemetry.inject(span, request)
        if self._stream is None:
            self._stream = Stream(self._stub.Verify())
            self._remote = RemoteSequence()
            request.start.CopyFrom(self._start)
        reply = await self._exchange(self._stream, request, committed, drafts)
        if reply.HasField("known_length"):
            self._remote.forget(reply.known_length)
            request.ClearField("start")
            reply = await self._exchange(self._stream, request, committed, drafts)
        rows = tuple(decode_row(row) for row in reply.rows)
        if len(rows) != len(drafts) + 1:
            raise StreamLostError(grpc.StatusCode.INTERNAL, f"{len(rows)} rows came, {len(drafts) + 1} were asked for")
        return rows, reply.timing

    async def _exchange(
        self,
        stream: Stream[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
        request: target_pb2.VerifyRequest,
        committed: Sequence[int],
        drafts: Sequence[int],
    ) -> target_pb2.VerifyResponse:
        """Send what the worker does not have yet and return its reply."""
        # The last `rows` tokens have to be fed in any case, for their rows to be computed.
        base, tokens = self._remote.plan(committed, drafts, feed_at_least=request.rows)
        request.base_length = base
        request.tokens[:] = tokens
        await stream.send(request, self._verify_timeout_s)
        try:
            while (reply := await stream.receive(self._verify_timeout_s)).round != request.round:
                pass
        except TimeoutError:
            raise StreamLostError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {self._verify_timeout_s:g} s"
            ) from None
        return reply

    async def _drop(self, lost: StreamLostError) -> None:
        log.warning("request %s: target lost: %s", self._start.request_id, lost)
        self._on_lost()
        await self.close()


@dataclass
class _Arrivals:
    """What has come of one Propose."""

    drafts: list[Draft] = field(default_factory=list)
    timing: worker_pb2.WorkerTiming = field(default_factory=worker_pb2.WorkerTiming)
    row_bytes: int = 0


class DraftSession:
    """A `Drafter` over gRPC. It never raises and never waits longer than its time limit.

    A worker that let a whole time limit pass without a draft is not asked again until it has answered, so that a
    stalled one costs one wait and not one a round; a broken stream is opened again after a back-off that no round waits
    for.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceAsyncStub,
        start: worker_pb2.SessionStart,
        *,
        info: Callable[[], worker_pb2.ModelInfo | None],
        timeout_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        """Make a session; the stream is opened by the first propose.

        Args:
            stub: The draft workers.
            start: Opens the session at a worker; its identity is filled in from `info`.
            info: Tells which draft fits the target now, None while none does.
            timeout_s: A round waits this long for its drafts.
            on_lost: Told of every lost stream.
        """
        self._stub = stub
        self._start = start
        self._info = info
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._stream: Stream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse] | None = None
        self._is_new = False
        self._remote = RemoteSequence()
        self._backoff = Backoff()
        self._not_before_s = 0.0
        self._unanswered: int | None = None

    async def propose(self, round_index: int, committed: Sequence[int], gamma: int, span: Span) -> Proposal:
        """Propose up to `gamma` tokens to follow `committed`; fewer, or none, where the worker is late or lost."""
        info = self._info()
        if info is None:
            return Proposal(degraded="draft absent")
        if info.context_length:
            gamma = min(gamma, info.context_length - len(committed))
        if gamma <= 0:
            return Proposal(degraded="draft out of context")
        if time.monotonic() < self._not_before_s:
            return Proposal(degraded="draft lost")
        started_s = time.perf_counter()
        arrivals = _Arrivals()
        degraded = ""
        try:
            if not self._has_caught_up():
                return Proposal(degraded="draft late")
            async with asyncio.timeout(self._timeout_s):
                self._open(info)
                await self._ask(round_index, committed, gamma, span)
                async for reply in self._replies(round_index, committed, gamma, span):
                    self._take(reply, arrivals)
            self._backoff.reset()
        except TimeoutError:
            degraded = "draft late"
            self._unanswered = None if arrivals.drafts else round_index
        except StreamLostError as lost:
            degraded = "draft lost"
            await self._drop(lost)
        call = _call(arrivals.timing, time.perf_counter() - started_s, arrivals.row_bytes, self._start)
        return Proposal(tuple(arrivals.drafts[:gamma]), call, degraded)

    async def close(self) -> None:
        """Free the session, at the worker too."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None

    def _open(self, info: worker_pb2.ModelInfo) -> None:
        if self._stream is None:
            self._stream = Stream(self._stub.Propose())
            self._remote = RemoteSequence()
            self._start.identity.CopyFrom(info.identity)
            self._is_new = True

    async def _ask(self, round_index: int, committed: Sequence[int], gamma: int, span: Span) -> None:
        assert self._stream is not None
        request = draft_pb2.ProposeRequest(round=round_index, gamma=gamma)
        telemetry.inject(span, request)
        if self._is_new:
            request.start.CopyFrom(self._start)
            self._is_new = False
        base, tokens = self._remote.plan(committed)
        request.base_length = base
        request.tokens[:] = tokens
        await self._stream.send(request, self._timeout_s)

    async def _replies(
        self, round_index: int, committed: Sequence[int], gamma: int, span: Span
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """Yield this round's replies up to the last; stale ones of an earlier round are dropped."""
        while self._stream is not None:
            reply = await self._stream.receive(self._timeout_s)
            if reply.round != round_index:
                continue
            if reply.HasField("known_length"):
                self._remote.forget(reply.known_length)
                await self._ask(round_index, committed, gamma, span)
                continue
            yield reply
            if reply.done:
                return

    def _take(self, reply: draft_pb2.ProposeResponse, arrivals: _Arrivals) -> None:
        for draft in reply.drafts:
            row = decode_row(draft.q)
            arrivals.drafts.append(Draft(draft.token, row))
            arrivals.row_bytes += row.nbytes
            self._remote.append(draft.token)
        if reply.done:
            arrivals.timing = reply.timing

    def _has_caught_up(self) -> bool:
        """Return whether the worker has answered everything that it was asked, dropping answers that came too late."""
        while self._unanswered is not None and self._stream is not None:
            reply = self._stream.receive_nowait()
            if reply is None:
                return False
            if reply.round == self._unanswered and (reply.done or reply.HasField("known_length")):
                self._unanswered = None
        return True

    async def _drop(self, lost: StreamLostError) -> None:
        log.warning("request %s: draft lost: %s", self._start.request_id, lost)
        self._on_lost()
        self._unanswered = None
        self._not_before_s = time.monotonic() + self._backoff.step()
        await self.close()


def _call(timing: worker_pb2.WorkerTiming, elapsed_s: float, row_bytes: int, start: worker_pb2.SessionStart) -> Call:
    return Call(
        elapsed_s=elapsed_s,
        queue_s=timing.queue_ms / 1e3,
        forward_s=timing.forward_ms / 1e3,
        service_s=timing.service_ms / 1e3,
        forward_tokens=timing.forward_tokens,
        row_bytes=row_bytes,
        model=start.identity.model_id,
        worker=timing.worker_id,
    )
