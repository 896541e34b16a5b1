"""Domain errors to gRPC statuses, in one place, so that a handler raises and nothing leaks."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from services.common.specdec.errors import CapacityError, InvalidFieldError, RequestError, WrongModelError

log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

STATUS: dict[type[RequestError], grpc.StatusCode] = {
    InvalidFieldError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongModelError: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class RpcError(RequestError):
    """A refusal with a status of its own, raised where no domain error fits."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


async def abort(context: Context, error: BaseException, request_id: str) -> NoReturn:
    """End the call with the status of an error.

    The message of a `RequestError` is meant for the caller. Anything else is a bug: the details go to the log and the
    caller gets INTERNAL with the request id to find them by.
    """
    if isinstance(error, RpcError):
        await context.abort(error.code, str(error))
    for kind, code in STATUS.items():
        if isinstance(error, kind):
            await context.abort(code, str(error))
    log.error("request %s failed", request_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the log has it under request id {request_id}")
    raise AssertionError("abort returned")


def guard_unary(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap a unary handler so that its exceptions become statuses."""

    @functools.wraps(handler)
    async def guarded(self: Any, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort(context, error, _request_id(context))

    return guarded


def guard_stream(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Wrap a streaming handler so that its exceptions become statuses and it is closed when the call ends."""

    @functools.wraps(handler)
    async def guarded(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        replies = handler(self, request, context)
        try:
            async for reply in replies:
                yield reply
        except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
            raise
        except Exception as error:
            await abort(context, error, _request_id(context))
        finally:
            await replies.aclose()  # type: ignore[attr-defined]

    return guarded


def _request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "paceline-request-id":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return "-"
