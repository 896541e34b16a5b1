"""The floor: a process that carries the messages of a coordinator's rounds and does nothing with them.

`python -m bench.relay --worker 127.0.0.1:50051`
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import grpc
from pydantic import Field

from bench.scripted import DRAFT, TARGET, Context
from paceline.v1 import coordinator_pb2, draft_pb2, target_pb2
from services.common.rpc.channel import open_channel
from services.common.rpc.server import Server, run, run_process
from services.common.rpc.settings import ServerSettings, command

SERVICE = "paceline.v1.CoordinatorService"
# What most rounds have to say: two drafts kept and one token more.
_TOKENS = (1, 2, 3)


class RelaySettings(ServerSettings):
    """Settings of the relay."""

    env_prefix: ClassVar[str] = "PACELINE_BENCH_"

    worker: str = Field("127.0.0.1:50051", description="The scripted workers.")


def _chunk() -> bytes:
    kept, last = coordinator_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT, coordinator_pb2.TOKEN_ORIGIN_RESIDUAL
    origins = (*[kept] * (len(_TOKENS) - 1), last)
    tokens = [
        coordinator_pb2.Token(id=id_, origin=origin, text=" abcd") for id_, origin in zip(_TOKENS, origins, strict=True)
    ]
    chunk = coordinator_pb2.TextChunk(text=" abcd" * len(tokens), tokens=tokens)
    return coordinator_pb2.GenerateResponse(chunk=chunk).SerializeToString()


class _Relay:
    """Serves Generate: one Propose, one Verify and one chunk a round, none of them read."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._propose: Any = channel.stream_stream(f"/{DRAFT}/Propose")
        self._verify: Any = channel.stream_stream(f"/{TARGET}/Verify")
        self._chunk = _chunk()

    async def generate(self, request: coordinator_pb2.GenerateRequest, context: Context) -> None:
        """Go on until the client has enough."""
        propose, verify = self._propose(), self._verify()
        try:
            for index in range(request.max_tokens):
                base = len(request.tokens.ids) + len(_TOKENS) * index
                asked = draft_pb2.ProposeRequest(
                    round=index, base_length=base, tokens=_TOKENS[-1:], gamma=request.gamma
                )
                await propose.write(asked.SerializeToString())
                await propose.read()
                tokens = range(request.gamma + 1)
                judged = target_pb2.VerifyRequest(round=index, base_length=base, tokens=tokens, rows=len(tokens))
                await verify.write(judged.SerializeToString())
                await verify.read()
                await context.write(self._chunk)
        finally:
            for call in (propose, verify):
                call.cancel()


@command(RelaySettings, name="relay")
def main(settings: RelaySettings) -> None:
    """Serve Generate without a coordinator."""

    async def nothing() -> None:
        pass

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = Server(settings, [SERVICE])
            channel = await stack.enter_async_context(
                open_channel(
                    settings.worker, DRAFT, max_message_mib=settings.max_message_mib, keepalive_s=settings.keepalive_s
                )
            )
            handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
                _Relay(channel).generate, coordinator_pb2.GenerateRequest.FromString
            )
            server.grpc.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),)
            )
            await run(server, nothing, nothing)

    run_process(settings, "relay", serve)


if __name__ == "__main__":
    main()
