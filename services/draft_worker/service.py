"""The draft worker's RPCs: decode, propose, encode."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import grpc

from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc.codec import encode_row
from services.common.rpc.errors import Context, RpcError, statuses
from services.common.rpc.server import Server
from services.common.rpc.worker import Inbox, Received, Streams, StreamSession, open_session, send
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from services.common.specdec.types import MAX_GAMMA
from services.draft_worker.proposer import Features, ProposalRequest, Proposer, ProposeSession, SessionRequest

SERVICE = "paceline.v1.DraftService"

Requests: TypeAlias = Inbox[draft_pb2.ProposeRequest]


@dataclass(frozen=True, slots=True)
class Serving:
    """A warm drafter."""

    proposer: Proposer
    info: worker_pb2.ModelInfo


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Serves Propose; UNAVAILABLE until a drafter is attached."""

    def __init__(self, server: Server, idle_timeout_s: float, max_streams: int) -> None:
        """Serve nothing yet.

        Args:
            server: Tells whether it drains, which every reply says.
            idle_timeout_s: A session that is asked nothing for this long gives its cache back.
            max_streams: Most sessions open at once, those without a cache too.
        """
        self._server = server
        self._idle_timeout_s = idle_timeout_s
        self._streams = Streams(max_streams)
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
        """Serve one session: its KV cache lives no longer than this call."""
        async with statuses(context) as call:
            warm = self._warm()
            with self._streams, contextlib.closing(StreamSession(partial(_open, warm))) as owned:
                # Read ahead: a request that arrives while an older one is being answered ends that one.
                async with Inbox(requests, self._idle_timeout_s, owned.close) as inbox:
                    async for request, received in inbox:
                        call.request_id = request.start.request_id or call.request_id
                        call.enter(request.traceparent)
                        session = await owned.session(request)
                        answer = _Answer(request, received, session, inbox, warm.info)
                        async with contextlib.aclosing(answer.replies()) as replies:
                            async for reply in replies:
                                reply.draining = self._server.draining
                                await send(context, reply, self._idle_timeout_s)

    def _warm(self) -> Serving:
        if self._serving is None:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        return self._serving


async def _open(warm: Serving, start: worker_pb2.SessionStart) -> ProposeSession:
    params, rule = open_session(start, warm.info.identity)
    request = SessionRequest(params, start.seed, start.prompt_length, start.max_new_tokens, rule)
    return await warm.proposer.open(request)


@dataclass
class _Answer:
    """One request and what it takes to answer it."""

    request: draft_pb2.ProposeRequest
    received: Received
    session: ProposeSession
    inbox: Requests
    info: worker_pb2.ModelInfo

    async def replies(self) -> AsyncGenerator[draft_pb2.ProposeResponse, None]:
        """Yield the drafts as they are sampled; none more once the next request is here.

        Whether another draft is sampled is decided by the clock and the inbox, never by a draft's value.
        """
        request = self.request
        if request.gamma > MAX_GAMMA:
            raise InvalidFieldError("gamma", request.gamma, f"at most {MAX_GAMMA}")
        if not 0 <= request.stop_below <= 1:
            raise InvalidFieldError("stop_below", request.stop_below, "0 to 1, a probability")
        # One that is overtaken asks for nothing; what it brought is taken in all the same.
        gamma = request.gamma if self.inbox.is_empty else 0
        count = 0
        try:
            features = Features(request.features.start, request.features.data) if request.HasField("features") else None
            asked = ProposalRequest(
                *(request.round, request.base_length, request.tokens, gamma), features, request.stop_below
            )
            proposing = self.session.propose(asked)
            async with contextlib.aclosing(proposing):
                async for drafts in proposing:
                    reply = draft_pb2.ProposeResponse(round=request.round)
                    reply.drafts.extend(draft_pb2.DraftToken(token=d.token, q=encode_row(d.q)) for d in drafts)
                    count += len(drafts)
                    if count >= gamma:
                        yield self._last(reply)
                        return
                    yield reply
                    if not self.inbox.is_empty:
                        break
        except UnknownPrefixError as error:
            yield draft_pb2.ProposeResponse(round=request.round, known_length=error.known_length, done=True)
            return
        yield self._last(draft_pb2.ProposeResponse(round=request.round))

    def _last(self, reply: draft_pb2.ProposeResponse) -> draft_pb2.ProposeResponse:
        reply.done = True
        reply.timing.CopyFrom(self.received.timing(self.session.timing, self.info.worker_id))
        self.received.trace(
            self.session.timing,
            {"paceline.draft.worker": self.info.worker_id, "paceline.draft.model": self.info.identity.model_id},
        )
        return reply
