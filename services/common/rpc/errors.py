"""Domain errors to gRPC statuses, in one place, so that a handler raises and nothing leaks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
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


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the status of an error: INTERNAL for what is no refusal but a bug."""
    if isinstance(error, RpcError):
        return error.code
    return next((code for kind, code in STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def abort(context: Context, error: BaseException, request_id: str) -> NoReturn:
    """End the call with the status of an error.

    The message of a `RequestError` is meant for the caller. Anything else is a bug: the details go to the log and the
    caller gets INTERNAL with the request id to find them by.
    """
    if isinstance(error, RequestError):
        await context.abort(status_of(error), str(error))
    log.error("request %s failed", request_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the log has it under request id {request_id}")
    raise AssertionError("abort returned")


@dataclass
class CallInfo:
    """What is known of a call by the time that it fails."""

    request_id: str = "-"


class statuses:  # noqa: N801 - used as a context manager
    """Turn what a handler raises into the call's status."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call = CallInfo()

    async def __aenter__(self) -> CallInfo:
        return self._call

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            await abort(self._context, error, self._call.request_id)
