"""A server and its callers: a call that tells who called, and a stream that goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.rpc.tls import ClientFiles, ClientTls

NAME = "tests.Link"


@contextlib.asynccontextmanager
async def serving(interceptors: Sequence[grpc.aio.ServerInterceptor] = (), **settings: Any) -> AsyncIterator[Server]:
    """Run a server with two methods: one answers with the certificate that the caller has shown, one repeats."""

    async def shown(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return b"".join(context.auth_context().get("x509_pem_cert", ()))

    async def echo(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for request in requests:
            await context.write(request)

    server = Server(ServerSettings.model_validate({"shutdown_grace_s": 0, **settings}), [NAME], guards=interceptors)
    handlers: dict[str, Any] = {
        "Shown": grpc.unary_unary_rpc_method_handler(shown),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    await server.listen()
    await server.ready()
    try:
        yield server
    finally:
        await server.stop()


def channel_to(server: Server, files: ClientFiles | None) -> grpc.aio.Channel:
    """Open a channel; None for plain text."""
    return open_channel(
        server.address, NAME, max_message_mib=4, keepalive_s=10, tls=ClientTls(files) if files else None
    )


async def shown_on(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> str:
    """Call, and return the certificate that was shown.

    Raises:
        grpc.aio.AioRpcError: The call was refused.
    """
    reply: bytes = await channel.unary_unary(f"/{NAME}/Shown")(b"", timeout=20, metadata=tuple(metadata))
    return reply.decode()


async def refusal_of(server: Server, files: ClientFiles | None) -> tuple[grpc.StatusCode, str]:
    """Call on a channel of its own, and return how that was refused."""
    async with channel_to(server, files) as channel:
        try:
            await shown_on(channel)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError("the call was let in")


class Conversation:
    """A stream that goes on: what is said in it is said back."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = channel.stream_stream(f"/{NAME}/Echo")()

    async def goes_on(self) -> bool:
        """Say something, and return whether it is said back."""
        async with asyncio.timeout(10):
            await self._call.write(b"still there")
            return bool(await self._call.read() == b"still there")

    async def end(self) -> None:
        """End it as it should."""
        await self._call.done_writing()
        assert await self._call.code() is grpc.StatusCode.OK
