"""A `Verifier` over gRPC: one stream at a time, opened again wherever it is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import grpc
from opentelemetry.trace import Span

from paceline.v1 import target_pb2, target_pb2_grpc, worker_pb2
from services.common.rpc import telemetry
from services.common.rpc.codec import decode_target_row
from services.common.rpc.stream import Stream, StreamLostError
from services.common.specdec.partial import NO_IDS, AnyRow, Ids, PartialRow
from services.common.specdec.types import MAX_GAMMA, Draft
from services.coordinator.clients.features import FeatureRelay
from services.coordinator.clients.move import Move
from services.coordinator.clients.question import Question
from services.coordinator.clients.session import Backoff, Line, call_of
from services.coordinator.heads import RowHeads
from services.coordinator.ports import TargetChangedError, TargetFullError, TargetUnavailableError, Verification

log = logging.getLogger(__name__)

TargetLine: TypeAlias = Line[target_pb2.VerifyRequest, target_pb2.VerifyResponse]

# Statuses that another attempt, perhaps on another pod, cannot mend.
_HOPELESS = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED})
# A row of q over this: p at its ids is most of p.
_WIDE_BYTES = 8 * 4_096


class TargetRefusesError(Exception):
    """The target finds fault with what the coordinator has sent: a bug, or another version."""


class TargetSession:
    """A `Verifier` over gRPC.

    A worker that drains is left between two rounds, once another has taken the text in; where there is none, the rounds
    go on where they are.
    """

    def __init__(
        self,
        stub: target_pb2_grpc.TargetServiceAsyncStub,
        start: worker_pb2.SessionStart,
        *,
        verify_timeout_s: float,
        retry_s: float,
        on_lost: Callable[[grpc.StatusCode], None],
        on_retry: Callable[[], None] = lambda: None,
        is_current: Callable[[], bool],
        heads: RowHeads | None = None,
        whole_rows: int = MAX_GAMMA + 1,
        features: FeatureRelay | None = None,
    ) -> None:
        """Make a session; the stream is opened by the first verify.

        Args:
            stub: The target workers.
            start: Opens the session at a worker.
            verify_timeout_s: A worker silent for this long is given up.
            retry_s: How long a lost target is looked for.
            on_lost: Told of every lost stream, with the status that it ended with.
            on_retry: Told of every attempt at an answer after the first.
            is_current: Whether the target that the request was planned for is still the one that new requests get.
            heads: How much of a row is asked for; None asks for whole rows.
            whole_rows: How many of those a message has room for.
            features: Where the draft's hidden states go; None asks for none.
        """
        self._stub = stub
        self._start = start
        self._verify_timeout_s = verify_timeout_s
        self._retry_s = retry_s
        self._on_lost = on_lost
        self._on_retry = on_retry
        self._is_current = is_current
        self._heads = heads
        self._whole_rows = whole_rows
        self._features = features
        self._line: TargetLine | None = None
        self._move: Move[target_pb2.VerifyRequest, target_pb2.VerifyResponse] = Move()
        self._has_answered = False

    async def verify(
        self, round_index: int, committed: Sequence[int], drafts: Sequence[Draft], span: Span, *, states: bool = True
    ) -> Verification:
        """Return p after `committed` and after each draft, from this worker or, if it is lost, from another.

        Raises:
            TargetChangedError: Another model is the target now, and this session has had no answer yet.
            TargetUnavailableError: No worker could be had within `retry_s`; a TargetFullError where there were workers.
        """
        started_s = time.perf_counter()
        await self._leave_draining(round_index, committed)
        form = self._form(drafts)
        # Asked in any case: it forgets the states of drafts that were rejected.
        lacking = self._features.ask_from(len(committed)) if self._features is not None else None
        wanted = lacking if states else None
        tokens = [draft.token for draft in drafts]
        question = Question(round_index, committed, tokens, *form, features_from=wanted)
        rows, timing = await self._answer(question, span)
        elapsed_s = time.perf_counter() - started_s
        if self._heads is not None and question.head and any(isinstance(row, PartialRow) for row in rows):
            self._heads.count_round()
        size = sum(row.nbytes for row in rows)
        fetched: list[int] = []
        return Verification(
            rows,
            call_of(timing, elapsed_s, size, self._start.identity.model_id),
            partial(self._fetch, question, fetched),
            fetched,
        )

    def _form(self, drafts: Sequence[Draft]) -> tuple[Sequence[Ids] | None, int]:
        """Return the supports and the head to ask for; no supports for whole rows."""
        if self._heads is None:
            return None, 0
        nowhere = [NO_IDS] * (len(drafts) + 1)
        if self._start.verification == worker_pb2.VERIFICATION_COUPLED:
            # The worker chooses from all of the row, by the same noise.
            return nowhere, 0
        if any(draft.q.nbytes > _WIDE_BYTES for draft in drafts):
            # So wide that rows may as well come whole. Where a message has no room for them all, those that are reached
            # are fetched one by one.
            return (None, 0) if len(nowhere) <= self._whole_rows else (nowhere, self._heads.size)
        return [*(draft.q.support for draft in drafts), NO_IDS], self._heads.size

    async def _fetch(
        self, question: Question, fetched: list[int], index: int, support: Ids | None, span: Span
    ) -> AnyRow:
        """Return one of the rows of a question again: over another support, or whole."""
        if support is None and self._heads is not None:
            self._heads.count_fetch()
        (row,), _ = await self._answer(question.again(index, support), span)
        fetched.append(row.nbytes)
        return row

    async def _answer(self, question: Question, span: Span) -> tuple[tuple[AnyRow, ...], worker_pb2.WorkerTiming]:
        """Return what a worker answers, this one or, if it is lost, another."""
        backoff = Backoff()
        give_up_s: float | None = None
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._attempt(question, span)
            except StreamLostError as lost:
                await self._drop(lost)
                span.set_attribute("paceline.retries", attempts)
                # From the loss on: a target that was silent for longer than this deserves another attempt too.
                if give_up_s is None:
                    give_up_s = time.monotonic() + self._retry_s
                self._judge(lost, attempts, give_up_s)
            await asyncio.sleep(backoff.step())
            self._on_retry()

    async def close(self) -> None:
        """Free the session, at the worker too."""
        line, self._line = self._line, None
        try:
            if line is not None:
                await line.close()
        finally:
            await self._move.close()

    def _judge(self, lost: StreamLostError, attempts: int, give_up_s: float) -> None:
        """Raise what a loss means where another attempt could not, or should not, mend it."""
        if lost.code in _HOPELESS:
            raise TargetRefusesError(f"the target refuses what the coordinator sends: {lost}") from lost
        if not self._has_answered and not self._is_current():
            raise TargetChangedError(str(lost)) from lost
        if time.monotonic() >= give_up_s:
            full = lost.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            kind = TargetFullError if full else TargetUnavailableError
            raise kind(f"no target worker after {attempts} attempts in {self._retry_s:g} s: {lost}") from lost

    async def _attempt(self, question: Question, span: Span) -> tuple[tuple[AnyRow, ...], worker_pb2.WorkerTiming]:
        if self._line is None:
            self._line = self._new_line()
        request = question.message()
        telemetry.inject(span, request)
        reply = await self._ask(self._line, request, question.committed, question.drafts)
        if (came := len(reply.rows)) != question.returned:
            told = f"{came} rows came, {question.returned} were asked for"
            raise StreamLostError(grpc.StatusCode.INTERNAL, told)
        self._has_answered = True
        if self._features is not None and reply.HasField("features"):
            self._features.put(reply.features)
        supports = question.supports or itertools.repeat(None)
        return tuple(map(decode_target_row, reply.rows, supports)), reply.timing

    def _new_line(self) -> TargetLine:
        return Line(Stream(self._stub.Verify()), self._start)

    async def _ask(
        self, line: TargetLine, request: target_pb2.VerifyRequest, committed: Sequence[int], drafts: Sequence[int]
    ) -> target_pb2.VerifyResponse:
        """Return the reply, having sent the worker what it says it lacks."""
        reply = await self._exchange(line, request, committed, drafts)
        if reply.HasField("known_length"):
            line.remote.forget(reply.known_length)
            reply = await self._exchange(line, request, committed, drafts)
        line.draining = reply.draining
        return reply

    async def _exchange(
        self, line: TargetLine, request: target_pb2.VerifyRequest, committed: Sequence[int], drafts: Sequence[int]
    ) -> target_pb2.VerifyResponse:
        """Send what the worker does not have yet and return its reply."""
        # The last `rows` tokens have to be fed in any case, for their rows to be computed.
        base, tokens = line.remote.plan(committed, drafts, feed_at_least=request.rows)
        request.base_length = base
        request.tokens[:] = tokens
        if line.start is None:
            request.ClearField("start")
        else:
            request.start.CopyFrom(line.start)
            line.start = None
        await line.stream.send(request, self._verify_timeout_s)
        try:
            while (reply := await line.stream.receive(self._verify_timeout_s)).round != request.round:
                pass
        except TimeoutError:
            raise StreamLostError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {self._verify_timeout_s:g} s"
            ) from None
        return reply

    async def _leave_draining(self, round_index: int, committed: Sequence[int]) -> None:
        if self._line is None or not self._line.draining:
            return
        elsewhere = self._move.taken()
        if elsewhere is None:
            self._move.begin(partial(self._open_elsewhere, round_index, list(committed)))
            return
        log.info("on another target")
        left, self._line = self._line, elsewhere
        await left.close()

    async def _open_elsewhere(self, round_index: int, committed: Sequence[int]) -> TargetLine:
        """Open a line and have its worker take the text in. The row that it answers with is of no use."""
        line = self._new_line()
        try:
            reply = await self._ask(line, target_pb2.VerifyRequest(round=round_index, rows=1), committed, ())
            if reply.draining:
                raise StreamLostError(grpc.StatusCode.UNAVAILABLE, "that one drains too")
        except BaseException:
            await line.close()
            raise
        self._move.succeeded()
        return line

    async def _drop(self, lost: StreamLostError) -> None:
        log.warning("target lost: %s", lost)
        self._on_lost(lost.code)
        await self.close()
