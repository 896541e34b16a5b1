"""A channel whose credentials are replaced while calls run: they go on, new ones begin on a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from services.common.rpc.tls import ClientTls

# Calls end by their own deadlines; this is for those that have none.
_DRAIN_S = 24 * 3600.0


class RenewedChannel(grpc.aio.Channel):
    """A channel that opens another in its place when its credentials have changed, and closes the old one in the end.

    Whether they have is looked up as calls begin; the old one is closed when its calls have ended.
    """

    def __init__(self, tls: ClientTls, open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls, self._open = tls, open_channel
        self._credentials = tls.current()
        self._channel = open_channel(self._credentials)
        self._draining: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def unary_unary(self, method: str, *how: Any, **named: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._late("unary_unary", method, *how, **named)

    def unary_stream(self, method: str, *how: Any, **named: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._late("unary_stream", method, *how, **named)

    def stream_unary(self, method: str, *how: Any, **named: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._late("stream_unary", method, *how, **named)

    def stream_stream(self, method: str, *how: Any, **named: Any) -> Any:
        """See `grpc.aio.Channel`."""
        return self._late("stream_stream", method, *how, **named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See `grpc.aio.Channel`; of the newest connection."""
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See `grpc.aio.Channel`; of the newest connection."""
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See `grpc.aio.Channel`; of the newest connection."""
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """See `grpc.aio.Channel`; those before it too."""
        old = list(self._draining.values())
        for task in self._draining:
            task.cancel()
        await asyncio.gather(*self._draining, return_exceptions=True)
        await asyncio.gather(*(channel.close(grace) for channel in (*old, self._channel)))

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _current(self) -> grpc.aio.Channel:
        credentials = self._tls.current()
        if credentials is not self._credentials:
            old, self._channel = self._channel, self._open(credentials)
            self._credentials = credentials
            draining = asyncio.create_task(old.close(_DRAIN_S))
            self._draining[draining] = old
            draining.add_done_callback(lambda task: self._draining.pop(task, None))
        return self._channel

    def _late(self, kind: str, method: str, *how: Any, **named: Any) -> Callable[..., Any]:
        """Return a callable that is made on the newest channel when it is called."""
        made: tuple[grpc.aio.Channel, Callable[..., Any]] | None = None

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            channel = self._current()
            if made is None or made[0] is not channel:
                made = channel, getattr(channel, kind)(method, *how, **named)
            return made[1](*arguments, **options)

        return call
