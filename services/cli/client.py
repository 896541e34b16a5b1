"""One call to CoordinatorService.Generate, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import click
import grpc

from paceline.v1 import coordinator_pb2, coordinator_pb2_grpc
from services.cli.access import PLAIN, Access
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import retry_after_s

SERVICE = "paceline.v1.CoordinatorService"
_REQUEST_ID = "paceline-request-id"
_MAX_MESSAGE_MIB = 64
_KEEPALIVE_S = 10.0

OnTokens = Callable[[list[coordinator_pb2.Token]], None]


class CallError(click.ClickException):
    """The call failed: one line with the status and the reason, exit code 1."""


@dataclass
class Answer:
    """What arrived, and when by this side's clock."""

    tokens: list[coordinator_pb2.Token] = field(default_factory=list)
    result: coordinator_pb2.GenerateResult = field(default_factory=coordinator_pb2.GenerateResult)
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(token.text for token in self.tokens)


async def stream_answer(
    address: str,
    request: coordinator_pb2.GenerateRequest,
    on_tokens: OnTokens,
    *,
    deadline_s: float | None = None,
    traceparent: str | None = None,
    access: Access = PLAIN,
) -> Answer:
    """Call Generate and return the whole answer.

    Args:
        address: Of a coordinator, a gRPC name.
        request: What to ask.
        on_tokens: Called with the tokens of each chunk as it arrives.
        deadline_s: The call's deadline; None leaves it to the server.
        traceparent: W3C trace context to send.
        access: Certificates and the like.

    Raises:
        CallError: The call failed.
    """
    metadata = [*access.metadata, *([("traceparent", traceparent)] if traceparent else [])]
    answer = Answer()
    async with open_channel(
        address, SERVICE, max_message_mib=_MAX_MESSAGE_MIB, keepalive_s=_KEEPALIVE_S, tls=access.tls
    ) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        started_s = time.perf_counter()
        call = stub.Generate(request, timeout=deadline_s, metadata=metadata)
        try:
            async for response in call:
                if response.HasField("chunk"):
                    answer.first_token_s = answer.first_token_s or time.perf_counter() - started_s
                    answer.tokens.extend(response.chunk.tokens)
                    on_tokens(list(response.chunk.tokens))
                else:
                    answer.result = response.result
        except grpc.aio.AioRpcError as error:
            raise CallError(_explain(error, address, deadline_s)) from None
        finally:
            # Leaving the loop early does not end the call by itself.
            call.cancel()
        answer.total_s = time.perf_counter() - started_s
    if answer.result.finish_reason == coordinator_pb2.FINISH_REASON_UNSPECIFIED:
        raise CallError(f"the answer of {address} ended without a result")
    return answer


def _explain(error: grpc.aio.AioRpcError, address: str, deadline_s: float | None) -> str:
    details = " ".join((error.details() or "").split())
    answered = any(key == _REQUEST_ID for key, _ in error.initial_metadata() or ())
    if error.code() is grpc.StatusCode.UNAVAILABLE and not answered:
        return (
            f"UNAVAILABLE: no coordinator serves at {address} ({details}). "
            "Start one with `paceline up` and give the address that it prints as --address"
        )
    # The service has a limit of its own, and says so.
    of_client = "the server's" not in details
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and deadline_s is not None and of_client:
        return f"DEADLINE_EXCEEDED: the answer took longer than --deadline, {deadline_s:g} s"
    again_s = retry_after_s(error.trailing_metadata() or ())
    return f"{error.code().name}: {details}" + (f"; try again in {again_s:.2g} s" if again_s is not None else "")
