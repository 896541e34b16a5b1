"""Scripted workers: real gRPC servers whose p and q are tables on the last two tokens.

`tests.support.cluster` runs both with the real coordinator. A script (`tests.support.scripts`) says how a worker
behaves, and may be replaced while the worker runs: `cluster.draft.script = DraftScript(...)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from services.common.rpc.codec import decode_sampling, decode_support, encode_row
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.specdec.coupled import winner
from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.partial import AnyRow, narrowed
from services.common.specdec.sequence import CachedSequence
from services.common.specdec.types import BadRowError, Row, SamplingParams, check_row
from tests.support.laws import Law
from tests.support.scripts import NEVER, DraftScript, TargetScript, Turn
from tests.support.tokenizers import fingerprint, tokenizer_response

Request = TypeVar("Request", draft_pb2.ProposeRequest, target_pb2.VerifyRequest)
Context = grpc.aio.ServicerContext[Any, Any]


class _Inbox(Generic[Request]):
    """A stream's requests, one at a time, and a pause that a newer one ends."""

    def __init__(self, requests: Any) -> None:
        self._queue: asyncio.Queue[Request | None] = asyncio.Queue()
        self._arrived = asyncio.Event()
        self._pump = asyncio.create_task(self._read(requests))

    async def get(self) -> Request | None:
        """Return the next request; None after the last."""
        request = await self._queue.get()
        if self._queue.empty():
            self._arrived.clear()
        return request

    async def pause(self, pause_s: float) -> bool:
        """Wait, but no longer than until another request comes; return whether one has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if pause_s == NEVER else pause_s):
                await self._arrived.wait()
        return self._arrived.is_set()

    async def close(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            self._queue.put_nowait(request)
            self._arrived.set()
        self._queue.put_nowait(None)
        self._arrived.set()


@dataclass
class _Session:
    start: worker_pb2.SessionStart
    params: SamplingParams
    sequence: CachedSequence = field(default_factory=CachedSequence)


class ScriptedWorker:
    """What both scripted workers have: a server, sessions, counts.

    Attributes:
        law: The tables.
        info: What GetModelInfo answers; a changed identity refuses the sessions of the old one.
        settings: More of its server's, from its next start on.
        address: HOST:PORT, the same after a restart.
        open_streams: Streams that are open now.
        streams: Streams that were ever opened.
        requests: Requests received, over all streams.
        forward_tokens: Positions that a model would have been fed.
    """

    service = ""
    script: DraftScript | TargetScript

    def __init__(self, law: Law, *, eos_ids: Sequence[int] = (), context_length: int = 4096) -> None:
        self.law = law
        name = type(self).__name__
        self.info = worker_pb2.ModelInfo(
            identity=worker_pb2.ModelIdentity(model_id=name, weights_hash=f"{name}-1", dtype="float32"),
            vocab_size=law.vocab_size,
            tokenizer_fingerprint=fingerprint(law.vocab_size),
            context_length=context_length,
            eos_token_ids=eos_ids,
            worker_id=name,
        )
        self.settings: dict[str, Any] = {}
        self.address = "127.0.0.1:0"
        self.open_streams = 0
        self.streams = 0
        self.requests = 0
        self.forward_tokens = 0
        self._server: Server | None = None

    async def start(self) -> None:
        """Serve; after `stop`, on the same port."""
        settings = ServerSettings.model_validate({"listen": self.address, "shutdown_grace_s": 0} | self.settings)
        self._server = Server(settings, [self.service])
        self._register(self._server.grpc)
        self.address = await self._server.listen()
        await self._server.ready()

    async def serve(self) -> None:
        """Take sessions again, after `drain`."""
        assert self._server is not None
        self._server.draining = False
        await self._server.ready()

    async def drain(self) -> None:
        """Say that it is going to stop, and go on answering, as after SIGTERM."""
        assert self._server is not None
        await self._server.drain()

    async def stop(self) -> None:
        """Vanish: every stream breaks at once."""
        if self._server is not None:
            await self._server.grpc.stop(None)
            self._server = None

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def _run(self, requests: Any, context: Context, script_of: Any, answer: Any) -> None:
        """Answer a stream's requests one by one, with the faults that both kinds of worker have."""
        inbox: _Inbox[Any] = _Inbox(requests)
        session: _Session | None = None
        self.open_streams += 1
        self.streams += 1
        try:
            while (request := await inbox.get()) is not None:
                self.requests += 1
                script = script_of()
                if self.requests in script.die_on:
                    await context.abort(script.die_as, "the script says die")
                if request.HasField("start"):
                    session = await self._open(request.start, context)
                if session is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "start is missing in the first message")
                assert session is not None
                if self.requests in script.stall_on and await inbox.pause(NEVER):
                    continue
                await answer(session, request, inbox, context)
        finally:
            self.open_streams -= 1
            await inbox.close()

    async def _open(self, start: worker_pb2.SessionStart, context: Context) -> _Session:
        if start.identity != self.info.identity:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the session began with another model")
        return _Session(start, decode_sampling(start.sampling, SamplingParams()))

    async def _send(self, request: Any, reply: Any, context: Context) -> None:
        assert self._server is not None
        reply.draining = self._server.draining
        for sent in self.script.replies(request, reply):
            await context.write(sent)

    def _turn(self, session: _Session, round_index: int) -> Turn:
        start = session.start
        coupled = start.verification == worker_pb2.VERIFICATION_COUPLED
        return Turn(self.law, session.params, start.seed, coupled, round_index, session.sequence.tokens)

    def _feed(self, session: _Session, at_least: int = 1) -> int:
        """Count the positions that a model would be fed now."""
        fed = len(session.sequence.pending(at_least))
        session.sequence.cached = len(session.sequence.tokens)
        self.forward_tokens += fed
        return fed


class ScriptedDraft(ScriptedWorker, draft_pb2_grpc.DraftServiceServicer):
    """A draft worker whose q is a table."""

    service = "paceline.v1.DraftService"

    def __init__(self, law: Law, script: DraftScript | None = None, **options: Any) -> None:
        super().__init__(law, **options)
        self.script = script or DraftScript()

    def _register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(model=self.info)

    async def Propose(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await self._run(requests, context, lambda: self.script, self._answer)

    async def _answer(
        self,
        session: _Session,
        request: draft_pb2.ProposeRequest,
        inbox: _Inbox[draft_pb2.ProposeRequest],
        context: Context,
    ) -> None:
        began_s = time.perf_counter()
        sequence, script = session.sequence, self.script
        before = list(sequence.tokens)
        script.recall(sequence.tokens, request)
        try:
            sequence.rebase(request.base_length, request.tokens)
        except UnknownPrefixError as unknown:
            short = draft_pb2.ProposeResponse(round=request.round, known_length=unknown.known_length, done=True)
            await self._send(request, short, context)
            return
        turn = self._turn(session, request.round)
        turn.stop_below = request.stop_below
        first = len(sequence.tokens)
        turn.discarded = before[first] if first < len(before) else None
        reply = draft_pb2.ProposeResponse(round=request.round)
        fed = 0
        for offset in range(request.gamma):
            if not script.goes_on(turn, offset):
                break
            fed += self._feed(session)
            token = script.draw(turn, offset)
            q = script.q_row(turn, offset, token)
            if pause_s := script.pause_s(turn, offset, token):
                if reply.drafts:
                    await self._send(request, reply, context)
                    reply = draft_pb2.ProposeResponse(round=request.round)
                if await inbox.pause(pause_s):
                    return
            if not script.keeps(turn, token, q):
                break
            sequence.tokens.append(token)
            reply.drafts.append(draft_pb2.DraftToken(token=token, q=encode_row(q)))
            if script.one_by_one:
                await self._send(request, reply, context)
                reply = draft_pb2.ProposeResponse(round=request.round)
        reply.done = True
        reply.timing.service_ms = (time.perf_counter() - began_s) * 1e3
        reply.timing.forward_tokens = fed
        await self._send(request, reply, context)


class ScriptedTarget(ScriptedWorker, target_pb2_grpc.TargetServiceServicer):
    """A target worker whose p is a table."""

    service = "paceline.v1.TargetService"

    def __init__(self, law: Law, script: TargetScript | None = None, **options: Any) -> None:
        super().__init__(law, **options)
        self.script = script or TargetScript()

    def _register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(model=self.info)

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        response = tokenizer_response(self.law.vocab_size)
        response.identity.CopyFrom(self.info.identity)
        return response

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await self._run(requests, context, lambda: self.script, self._answer)

    async def _answer(
        self,
        session: _Session,
        request: target_pb2.VerifyRequest,
        inbox: _Inbox[target_pb2.VerifyRequest],
        context: Context,
    ) -> None:
        began_s = time.perf_counter()
        sequence = session.sequence
        if not 1 <= request.rows <= len(request.tokens):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"{request.rows} rows of {len(request.tokens)} tokens"
            )
        self.script.recall(sequence.tokens, request)
        try:
            sequence.rebase(request.base_length, request.tokens)
        except UnknownPrefixError as unknown:
            short = target_pb2.VerifyResponse(round=request.round, known_length=unknown.known_length)
            await self._send(request, short, context)
            return
        fed = self._feed(session, request.rows)
        if self.script.late_s and await inbox.pause(self.script.late_s):
            return
        turn = self._turn(session, request.round)
        reply = target_pb2.VerifyResponse(round=request.round)
        end = len(sequence.tokens) - request.rows + 1
        offsets = [request.fetch] if request.HasField("fetch") else range(request.rows)
        supports = list(request.supports) if self.script.in_part else []
        for offset, support in itertools.zip_longest(offsets, supports):
            turn.tokens = sequence.tokens[max(0, end + offset - 2) : end + offset]
            row = self.script.p_row(turn, offset)
            part = row if support is None else self._part(turn, row, support, request.head, end + offset)
            reply.rows.append(encode_row(part))
        reply.timing.service_ms = (time.perf_counter() - began_s) * 1e3
        reply.timing.forward_tokens = fed
        await self._send(request, reply, context)

    def _part(self, turn: Turn, row: Row, support: bytes, head: int, position: int) -> AnyRow:
        try:
            check_row(row, self.law.vocab_size)
        except BadRowError:
            return row
        choice = partial(winner, seed=turn.seed, position=position) if turn.coupled else None
        return narrowed(row, decode_support("supports", support, self.law.vocab_size), head, choice)
