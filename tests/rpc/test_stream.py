"""A stream that cannot go on says so: nobody waits for a reply that will not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from paceline.v1 import draft_pb2, draft_pb2_grpc
from services.common.rpc.stream import Stream, StreamLostError

NOT_A_MESSAGE = b"\xff\xff"
Drafting: TypeAlias = Stream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]


@asynccontextmanager
async def asked(worker: grpc.GenericRpcHandler) -> AsyncIterator[Drafting]:
    """Serve a worker, and yield a stream to it that one request has been sent on."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((worker,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
            stream: Drafting = Stream(stub.Propose())
            await stream.send(draft_pb2.ProposeRequest(), 30)
            yield stream
    finally:
        await server.stop(None)


class _Garbage(grpc.GenericRpcHandler):
    """A worker that answers every request with bytes that are no message."""

    def service(self, handler_call_details: Any) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for _ in requests:
                yield NOT_A_MESSAGE

        return grpc.stream_stream_rpc_method_handler(answer)  # type: ignore[arg-type]


async def test_a_reply_that_is_no_message_ends_the_stream() -> None:
    async with asked(_Garbage()) as stream:
        # Again and again, and not only to the first who asks.
        for _ in range(2):
            with pytest.raises(StreamLostError, match="INTERNAL: a reply cannot be decoded"):
                await stream.receive(30)
        await stream.close()


async def test_a_message_given_up_before_it_is_sent_ends_the_stream() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        # Waits for a connection for ever.
        stub = channel.stream_stream("/x/y", draft_pb2.ProposeRequest.SerializeToString)
        stream: Stream[draft_pb2.ProposeRequest, Any] = Stream(stub(wait_for_ready=True))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stream.send(draft_pb2.ProposeRequest(), 30)
        with pytest.raises(StreamLostError, match="CANCELLED"):
            await stream.receive(30)
        await stream.close()


class _Worker(grpc.GenericRpcHandler):
    """Is silent, or busy with what it was asked; and knows how its streams ended."""

    def __init__(self, *, busy: bool) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.asked = asyncio.Event()
        self._busy = busy

    def service(self, handler_call_details: Any) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            try:
                async for _ in requests:
                    self.asked.set()
                    if self._busy:
                        await asyncio.sleep(30)
                    yield b""
                self.ended.put_nowait("half-closed")
            except asyncio.CancelledError:
                self.ended.put_nowait("cancelled")
                raise

        return grpc.stream_stream_rpc_method_handler(answer)  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", [False, True])
async def test_a_worker_that_waits_is_told_the_end_and_one_at_work_is_cancelled(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not busy:
        monkeypatch.setattr("services.common.rpc.stream._END_S", 20.0)
    worker = _Worker(busy=busy)
    async with asked(worker) as stream:
        await asyncio.wait_for(worker.asked.wait(), 30)
        if not busy:
            await stream.receive(30)
        await stream.close()
        # While the channel is open: its end would end the stream too.
        assert await asyncio.wait_for(worker.ended.get(), 20) == ("cancelled" if busy else "half-closed")
