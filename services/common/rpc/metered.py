"""A channel whose streams count the bytes of their messages, as they are on the wire and before HTTP/2 frames them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc

Serialize = Callable[[Any], bytes]
Deserialize = Callable[[bytes], Any]


class _Metered:
    """The part of a channel that stubs use."""

    def __init__(self, channel: grpc.aio.Channel, sent: Callable[[int], None], received: Callable[[int], None]) -> None:
        self.unary_unary = channel.unary_unary
        self._channel = channel
        self._sent = sent
        self._received = received

    def stream_stream(
        self, method: str, request_serializer: Serialize, response_deserializer: Deserialize, **options: Any
    ) -> Any:
        def serialize(message: Any) -> bytes:
            data = request_serializer(message)
            self._sent(len(data))
            return data

        def deserialize(data: bytes) -> Any:
            self._received(len(data))
            return response_deserializer(data)

        return self._channel.stream_stream(method, serialize, deserialize, **options)


def metered(
    channel: grpc.aio.Channel, sent: Callable[[int], None], received: Callable[[int], None]
) -> grpc.aio.Channel:
    """Return a channel to make a stub of, whose bidi streams tell the bytes of each message.

    Counted where gRPC turns a message into bytes anyway: asking a message for its size would serialize it once more.

    Args:
        channel: The channel; it stays its owner's to close.
        sent: Told of each message that is sent.
        received: Told of each message that has come.
    """
    return cast("grpc.aio.Channel", _Metered(channel, sent, received))
