"""A `Drafter` over gRPC: what is late or lost costs a round its drafts, and no round waits for it twice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import grpc
from opentelemetry.trace import Span

from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc import telemetry
from services.common.rpc.codec import decode_row
from services.common.rpc.stream import Stream, StreamLostError
from services.common.specdec.types import Draft
from services.coordinator.clients.features import FeatureRelay
from services.coordinator.clients.move import Move
from services.coordinator.clients.session import Line, call_of
from services.coordinator.ports import Proposal

log = logging.getLogger(__name__)

DraftLine: TypeAlias = Line[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One Propose; see `Drafter.propose`."""

    round_index: int
    committed: Sequence[int]
    held: Sequence[int]
    gamma: int
    span: Span
    stop_below: float


@dataclass
class _Arrivals:
    """What has come of one Propose."""

    drafts: list[Draft]
    timing: worker_pb2.WorkerTiming = field(default_factory=worker_pb2.WorkerTiming)
    row_bytes: int = 0


class DraftSession:
    """A `Drafter` over gRPC. It never raises and never waits longer than its time limit.

    A worker that let the time limit pass is not asked again until it has finished its answer: a stalled one costs one
    wait and not one a round. A stream that broke, or whose worker drains, is replaced by one that is opened while the
    rounds go on; a worker that drains is used until then.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceAsyncStub,
        start: worker_pb2.SessionStart,
        *,
        info: Callable[[], worker_pb2.ModelInfo | None],
        timeout_s: float,
        on_lost: Callable[[grpc.StatusCode], None],
        features: FeatureRelay | None = None,
    ) -> None:
        """Make a session; the stream is opened by the first propose.

        Args:
            stub: The draft workers.
            start: Opens the session at a worker; its identity is filled in from `info`.
            info: Tells which draft fits the target now, None while none does.
            timeout_s: A round waits this long for its drafts.
            on_lost: Told of every lost stream, with the status that it ended with.
            features: Where the target's hidden states come from, for a draft that is fed with them.
        """
        self._stub = stub
        self._start = start
        self._info = info
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._features = features
        self._line: DraftLine | None = None
        self._was_opened = False
        self._move: Move[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse] = Move()
        self._unanswered: int | None = None
        self._sending: asyncio.Task[None] | None = None

    async def propose(
        self,
        round_index: int,
        committed: Sequence[int],
        gamma: int,
        span: Span,
        *,
        stop_below: float = 0.0,
        held: Sequence[int] = (),
        arrived: list[Draft] | None = None,
    ) -> Proposal:
        """Propose up to `gamma` tokens to follow `committed` and `held`; fewer where the worker is late, none if lost.

        May be cancelled at any moment: the worker goes on until the next request replaces this one, and what it still
        answers is dropped.
        """
        info = self._info()
        if info is None:
            return Proposal(degraded="draft absent")
        if info.context_length:
            gamma = min(gamma, info.context_length - len(committed) - len(held))
        if gamma <= 0:
            return Proposal(degraded="draft out of context")
        started_s = time.perf_counter()
        arrivals = _Arrivals([] if arrived is None else arrived)
        asked = _Asked(round_index, committed, held, gamma, span, stop_below)
        degraded = ""
        try:
            line = await self._find_line(round_index, info)
            if line is None:
                return Proposal(degraded="draft lost")
            if not self._has_caught_up(line):
                return Proposal(degraded="draft late")
            async with asyncio.timeout(self._timeout_s):
                await self._ask(line, asked)
                async for reply in self._replies(line, asked):
                    _take(line, reply, arrivals)
            if not line.draining:
                self._move.succeeded()
        except TimeoutError:
            degraded = "draft late"
            self._unanswered = round_index
        except StreamLostError as lost:
            degraded = "draft lost"
            await self._drop(lost)
        elapsed_s = time.perf_counter() - started_s
        call = call_of(arrivals.timing, elapsed_s, arrivals.row_bytes, info.identity.model_id)
        return Proposal(tuple(arrivals.drafts[:gamma]), call, degraded)

    async def close(self) -> None:
        """Free the session, at the worker too."""
        line, self._line = self._line, None
        try:
            if line is not None:
                await line.close()
            if self._sending is not None:
                # Over once its call is.
                await asyncio.gather(self._sending, return_exceptions=True)
        finally:
            await self._move.close()

    async def _find_line(self, round_index: int, info: worker_pb2.ModelInfo) -> DraftLine | None:
        """Return the line to use. Only the first is opened here: later ones are waited for by nobody."""
        if not self._was_opened:
            self._line, self._was_opened = self._new_line(info), True
        elif self._line is None or self._line.draining:
            elsewhere = self._move.taken()
            if elsewhere is None:
                self._move.begin(partial(self._open_elsewhere, round_index, info))
            else:
                log.info("request %s: on another draft", self._start.request_id)
                left, self._line, self._unanswered = self._line, elsewhere, None
                if left is not None:
                    await left.close()
        return self._line

    def _new_line(self, info: worker_pb2.ModelInfo) -> DraftLine:
        self._start.identity.CopyFrom(info.identity)
        return Line(Stream(self._stub.Propose()), self._start)

    async def _open_elsewhere(self, round_index: int, info: worker_pb2.ModelInfo) -> DraftLine:
        """Open a line and have its worker answer a request for nothing."""
        line = self._new_line(info)
        try:
            await self._send(line, draft_pb2.ProposeRequest(round=round_index))
            while not (reply := await line.stream.receive(self._timeout_s)).done:
                pass
            if reply.draining:
                raise StreamLostError(grpc.StatusCode.UNAVAILABLE, "that one drains too")
        except BaseException:
            await line.close()
            raise
        return line

    async def _ask(self, line: DraftLine, asked: _Asked) -> None:
        # gRPC refuses two messages at a time, and one that is given up half-way ends the call and its session with it:
        # a message goes out whole, whoever still waits for it. From here to there nothing may be given up either.
        if self._sending is not None and not self._sending.done():
            await asyncio.wait((self._sending,))
        request = draft_pb2.ProposeRequest(round=asked.round_index, gamma=asked.gamma, stop_below=asked.stop_below)
        telemetry.inject(asked.span, request)
        base, tokens = line.remote.plan(asked.committed, asked.held)
        request.base_length = base
        request.tokens[:] = tokens
        if (features := self._lacking(line, len(asked.committed))) is not None:
            request.features.CopyFrom(features)
        self._sending = asyncio.create_task(self._send(line, request))
        await asyncio.shield(self._sending)

    def _lacking(self, line: DraftLine, committed: int) -> worker_pb2.Features | None:
        """Return the hidden states that this worker lacks and that are here; it has them then."""
        if self._features is None:
            return None
        self._features.known_end = line.features_end
        features = self._features.take(committed)
        line.features_end = self._features.known_end
        return features

    async def _send(self, line: DraftLine, request: draft_pb2.ProposeRequest) -> None:
        if line.start is not None:
            request.start.CopyFrom(line.start)
            line.start = None
        await line.stream.send(request, self._timeout_s)

    async def _replies(self, line: DraftLine, asked: _Asked) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """Yield this round's replies up to the last; stale ones of an earlier round are dropped."""
        while True:
            reply = await line.stream.receive(self._timeout_s)
            line.draining |= reply.draining
            if reply.round != asked.round_index:
                continue
            if reply.HasField("known_length"):
                line.remote.forget(reply.known_length)
                line.features_end = None
                await self._ask(line, asked)
                continue
            yield reply
            if reply.done:
                return

    def _has_caught_up(self, line: DraftLine) -> bool:
        """Return whether the worker has answered everything that it was asked, dropping answers that came too late."""
        while self._unanswered is not None:
            reply = line.stream.receive_nowait()
            if reply is None:
                return False
            line.draining |= reply.draining
            if reply.round == self._unanswered and (reply.done or reply.HasField("known_length")):
                self._unanswered = None
        return True

    async def _drop(self, lost: StreamLostError) -> None:
        log.warning("request %s: draft lost: %s", self._start.request_id, lost)
        self._on_lost(lost.code)
        if self._features is not None:
            self._features.known_end = None
        self._unanswered = None
        self._move.hold_off()
        line, self._line = self._line, None
        if line is not None:
            await line.close()


def _take(line: DraftLine, reply: draft_pb2.ProposeResponse, arrivals: _Arrivals) -> None:
    for draft in reply.drafts:
        row = decode_row(draft.q)
        arrivals.drafts.append(Draft(draft.token, row))
        arrivals.row_bytes += row.nbytes
        line.remote.append(draft.token)
    if reply.done:
        arrivals.timing = reply.timing
