"""The target worker's RPCs: decode, verify, encode."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc

from paceline.v1 import target_pb2, target_pb2_grpc, worker_pb2
from services.common.engine.model import LoadedModel
from services.common.rpc.errors import Context, RpcError, statuses
from services.common.rpc.server import Server
from services.common.rpc.worker import Inbox, Received, Streams, StreamSession, open_session, send
from services.common.specdec.coupled import winner
from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.types import Row, VerificationMode
from services.target_worker.verifier import Choice, Verifier, VerifySession
from services.target_worker.wanted import Wanted

SERVICE = "paceline.v1.TargetService"


@dataclass(frozen=True, slots=True)
class Serving:
    """A warm model."""

    verifier: Verifier
    info: worker_pb2.ModelInfo
    tokenizer: target_pb2.GetTokenizerResponse


def serving(
    loaded: LoadedModel,
    verifier: Verifier,
    context_length: int,
    worker_id: str,
    features: worker_pb2.FeatureSpec | None = None,
) -> Serving:
    """Describe a model as the coordinator needs it described; sessions can become `context_length` tokens long."""
    identity = worker_pb2.ModelIdentity(model_id=loaded.model_id, weights_hash=loaded.weights_hash, dtype=loaded.dtype)
    info = worker_pb2.ModelInfo(
        identity=identity,
        vocab_size=loaded.vocab_size,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        context_length=context_length,
        eos_token_ids=loaded.eos_token_ids,
        worker_id=worker_id,
        features=features,
    )
    tokenizer = target_pb2.GetTokenizerResponse(
        tokenizer_json=loaded.tokenizer_json,
        chat_template=loaded.chat_template,
        generation_config_json=loaded.generation_config_json,
        special_tokens=loaded.special_tokens,
        identity=identity,
    )
    return Serving(verifier, info, tokenizer)


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Serves Verify; UNAVAILABLE until a model is attached."""

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
        """Begin to serve a model."""
        self._serving = serving

    async def GetModelInfo(  # noqa: N802
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        """Say what is served."""
        async with statuses(context):
            return target_pb2.TargetServiceGetModelInfoResponse(model=self._warm().info)

    async def GetTokenizer(  # noqa: N802
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> target_pb2.GetTokenizerResponse:
        """Hand out the model's files that the coordinator needs."""
        async with statuses(context):
            return self._warm().tokenizer

    # A coroutine that writes, not a generator that yields: a cancelled call is cancelled here, and frees its cache.
    async def Verify(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> None:
        """Serve one session: its KV cache lives no longer than this call."""
        async with statuses(context) as call:
            warm = self._warm()
            with self._streams, contextlib.closing(StreamSession(partial(_open, warm))) as owned:
                async with Inbox(requests, self._idle_timeout_s, owned.close) as inbox:
                    async for request, received in inbox:
                        call.request_id = request.start.request_id or call.request_id
                        call.enter(request.traceparent)
                        session = await owned.session(request)
                        reply = await self._verify(session, request, received, warm.info)
                        reply.draining = self._server.draining
                        await send(context, reply, self._idle_timeout_s)

    async def _verify(
        self,
        session: VerifySession,
        request: target_pb2.VerifyRequest,
        received: Received,
        info: worker_pb2.ModelInfo,
    ) -> target_pb2.VerifyResponse:
        wanted = Wanted.by(request, info.vocab_size)
        asked = request.base_length, request.tokens, request.rows
        try:
            if request.HasField("fetch"):
                verified = await session.fetch(*asked, request.fetch)
            else:
                # Nothing is fetched under COUPLED, nor of rows that go out whole.
                hold = wanted.supports is not None and session.choice is None
                features_from = request.features_from if request.HasField("features_from") else None
                verified = await session.verify(*asked, hold=hold, features_from=features_from)
        except UnknownPrefixError as error:
            return target_pb2.VerifyResponse(round=request.round, known_length=error.known_length)
        if verified.timing.forward_tokens:
            received.trace(
                verified.timing,
                {"paceline.target.worker": info.worker_id, "paceline.target.model": info.identity.model_id},
            )
        rows = await wanted.messages(verified.rows, session.choice)
        reply = target_pb2.VerifyResponse(
            round=request.round, rows=rows, timing=received.timing(verified.timing, info.worker_id)
        )
        if verified.features is not None:
            reply.features.start, reply.features.data = request.features_from, verified.features
        return reply

    def _warm(self) -> Serving:
        if self._serving is None:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is still being loaded")
        return self._serving


async def _open(warm: Serving, start: worker_pb2.SessionStart) -> VerifySession:
    params, rule = open_session(start, warm.info.identity)
    choice: Choice | None = partial(_winner, start.seed) if rule is VerificationMode.COUPLED else None
    return await warm.verifier.open(params, start.prompt_length, start.max_new_tokens, choice)


def _winner(seed: int, row: Row, position: int) -> tuple[int, float]:
    return winner(row, seed, position)
