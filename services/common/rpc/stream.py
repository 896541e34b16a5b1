"""The client's side of a bidi stream: one reader task, so that waiting for a reply can be given up without the call."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Generic, TypeVar

import grpc

Request = TypeVar("Request")
Reply = TypeVar("Reply")
_END_S = 0.05
_endings: set[asyncio.Task[None]] = set()
"""A task that nobody refers to may be collected before it is done."""


class StreamLostError(Exception):
    """The stream has ended; the message says how.

    Attributes:
        code: The status that it ended with.
    """

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Stream(Generic[Request, Reply]):
    """One session with one worker.

    `asyncio.wait_for(call.read(), t)` would cancel the whole call when the time is up, so a task reads the replies into
    a queue and the waiting is done there.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Reply]) -> None:
        self._call = call
        self._replies: asyncio.Queue[Reply | StreamLostError] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def send(self, request: Request, timeout_s: float) -> None:
        """Send a request.

        Raises:
            StreamLostError: The stream has ended, or the peer took nothing in for `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(request)
        except TimeoutError:
            raise StreamLostError(grpc.StatusCode.DEADLINE_EXCEEDED, "the worker takes nothing in") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader has the status, which says more than a failed write.
            raise await self._lost() from None
        except asyncio.CancelledError:
            if self._call.cancelled() and not _being_cancelled():
                raise await self._lost() from None
            # Given up while the call still waits for a connection, the message is not sent and the call goes on: the
            # worker would wait for this message, and whoever asks next for an answer to it.
            self._call.cancel()
            raise

    async def receive(self, timeout_s: float) -> Reply:
        """Return the next reply.

        Raises:
            TimeoutError: None came within `timeout_s`; the stream goes on.
            StreamLostError: The stream has ended.
        """
        async with asyncio.timeout(timeout_s):
            reply = await self._replies.get()
        return self._checked(reply)

    def receive_nowait(self) -> Reply | None:
        """Return the next reply if it is here already.

        Raises:
            StreamLostError: The stream has ended.
        """
        return None if self._replies.empty() else self._checked(self._replies.get_nowait())

    async def close(self) -> None:
        """End the session at the worker: at once, or in 50 ms where it is at work for it. Returns before that.

        Leaving the call to be collected would free nothing. Cancelling it at once would, but of each call that is
        cancelled while its server reads from it gRPC keeps some 120 bytes for ever there (grpcio 1.85).
        """
        if self._reader.done():
            self._call.cancel()
            return
        ending = asyncio.create_task(self._end())
        _endings.add(ending)
        ending.add_done_callback(_endings.discard)

    async def _end(self) -> None:
        try:
            # Whatever keeps a call from its end, gRPC's internal errors among it: it is cancelled then.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_END_S):
                    await self._call.done_writing()
                    await asyncio.wait({self._reader})
        finally:
            self._call.cancel()
            self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _checked(self, reply: Reply | StreamLostError) -> Reply:
        if isinstance(reply, StreamLostError):
            self._replies.put_nowait(reply)
            raise reply
        return reply

    async def _lost(self) -> StreamLostError:
        return StreamLostError(await self._call.code(), await self._call.details() or "no details")

    async def _read(self) -> None:
        try:
            async for reply in self._call:
                # What gRPC yields for bytes that are no such message.
                if reply is None:
                    self._call.cancel()
                    self._replies.put_nowait(StreamLostError(grpc.StatusCode.INTERNAL, "a reply cannot be decoded"))
                    return
                self._replies.put_nowait(reply)
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
        self._replies.put_nowait(await self._lost())


def _being_cancelled() -> bool:
    """Tell whether this very task is being cancelled: a call that is cancelled raises the same exception."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
