"""The draft worker's RPCs: decode, propose, encode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc.codec import encode_row
from services.common.rpc.errors import Context, RpcError, statuses
from services.common.rpc.worker import Received, open_session
from services.common.specdec.errors import UnknownPrefixError
from services.draft_worker.proposer import Proposer, ProposeSession

SERVICE = "paceline.v1.DraftService"

Inbox = asyncio.Queue[tuple[draft_pb2.ProposeRequest, Received] | None]


@dataclass(frozen=True, slots=True)
class Serving:
    """A warm drafter."""

    proposer: Proposer
    info: worker_pb2.ModelInfo


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves Propose; UNAVAILABLE until a drafter is attached."""

    def __init__(self) -> None:
        self._serving: Serving | None = None

    def attach(self, serving: Serving) -> None:
        """Begin to serve a drafter."""
        self._serving = serving

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        """Say what is served."""
        async with statuses(context):
            return draft_pb2.DraftServiceGetModelInfoResponse(model=self._warm().info)

    # A coroutine that writes, not a generator that yields: a cancelled call is cancelled here, and frees its cache.
    async def Propose(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[draft_pb2.ProposeRequest], context: Context
    ) -> None:
        """Serve one session: its KV cache lives as long as this call."""
        async with statuses(context) as call:
            warm = self._warm()
            session: ProposeSession | None = None
            # Read ahead: a request that arrives while an older one is being answered ends that one.
            inbox: Inbox = asyncio.Queue()
            reader = asyncio.create_task(_read(requests, inbox))
            try:
                while (item := await inbox.get()) is not None:
                    request, received = item
                    if session is None:
                        call.request_id = request.start.request_id
                        session = await _open(warm, request)
                    await _answer(session, request, received, inbox, warm.info, context)
            finally:
                reader.cancel()
                if session is not None:
                    session.close()

    def _warm(self) -> Serving:
        if self._serving is None:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        return self._serving


async def _read(requests: AsyncIterator[draft_pb2.ProposeRequest], inbox: Inbox) -> None:
    try:
        async for request in requests:
            inbox.put_nowait((request, Received(request)))
    finally:
        inbox.put_nowait(None)


async def _open(warm: Serving, request: draft_pb2.ProposeRequest) -> ProposeSession:
    start = request.start
    params = open_session(start, request.HasField("start"), warm.info.identity)
    return await warm.proposer.open(params, start.seed, start.prompt_length, start.max_new_tokens)


async def _answer(
    session: ProposeSession,
    request: draft_pb2.ProposeRequest,
    received: Received,
    inbox: Inbox,
    info: worker_pb2.ModelInfo,
    context: Context,
) -> None:
    """Send the drafts of one request as they are sampled; none more once the next request is here.

    Whether another draft is sampled is decided by the clock and the inbox, never by a draft's value.
    """
    # One that is overtaken already asks for nothing; what it brought is sent again if the drafter did not take it in.
    gamma = request.gamma if inbox.empty() else 0
    count = 0
    finished = False
    try:
        proposing = session.propose(request.round, request.base_length, request.tokens, gamma)
        async with contextlib.aclosing(proposing):
            async for drafts in proposing:
                reply = draft_pb2.ProposeResponse(round=request.round)
                reply.drafts.extend(draft_pb2.DraftToken(token=d.token, q=encode_row(d.q)) for d in drafts)
                count += len(drafts)
                finished = count >= gamma
                if finished:
                    _finish(reply, session, received, info)
                await context.write(reply)
                if finished or not inbox.empty():
                    break
    except UnknownPrefixError as error:
        await context.write(draft_pb2.ProposeResponse(round=request.round, known_length=error.known_length, done=True))
        return
    if not finished:
        reply = draft_pb2.ProposeResponse(round=request.round)
        _finish(reply, session, received, info)
        await context.write(reply)


def _finish(
    reply: draft_pb2.ProposeResponse, session: ProposeSession, received: Received, info: worker_pb2.ModelInfo
) -> None:
    reply.done = True
    reply.timing.CopyFrom(received.timing(session.timing, info.worker_id))
    received.trace(
        session.timing, {"paceline.draft.worker": info.worker_id, "paceline.draft.model": info.identity.model_id}
    )
