"""Domain errors to gRPC statuses, in one place, so that a handler raises and nothing leaks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn, TypeAlias

import grpc
from google.rpc import error_details_pb2, status_pb2

from services.common.rpc.call import CallInfo, serving
from services.common.specdec.errors import CapacityError, InvalidFieldError, RequestError, WrongModelError

log = logging.getLogger(__name__)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_DETAILS = "grpc-status-details-bin"

STATUS: dict[type[RequestError], grpc.StatusCode] = {
    InvalidFieldError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongModelError: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class RpcError(RequestError):
    """A refusal with a status of its own, raised where no domain error fits."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


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
        retry_after_s = error.retry_after_s if isinstance(error, RpcError) else None
        trailers = () if retry_after_s is None else (_retry_info(status_of(error), str(error), retry_after_s),)
        await context.abort(status_of(error), str(error), trailers)
    log.error("request %s failed", request_id, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the log has it under request id {request_id}")
    raise AssertionError("abort returned")


def retry_after_s(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Return when the server says that it is worth trying again, if it says so (google.rpc.RetryInfo)."""
    details = next((value for key, value in trailing_metadata if key == _DETAILS), b"")
    status = status_pb2.Status.FromString(details if isinstance(details, bytes) else b"")
    retry = error_details_pb2.RetryInfo()
    found = any(detail.Unpack(retry) for detail in status.details)
    return retry.retry_delay.ToTimedelta().total_seconds() if found else None


def _retry_info(code: grpc.StatusCode, message: str, retry_after_s: float) -> tuple[str, bytes]:
    """Return the trailer in which gRPC carries the details of a status."""
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromTimedelta(timedelta(seconds=retry_after_s))
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(retry)
    return _DETAILS, status.SerializeToString()


class statuses:  # noqa: N801 - used as a context manager
    """Turn what a handler raises into the call's status, and make the call the current one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._call = CallInfo()
        self._serving = serving(self._call)

    async def __aenter__(self) -> CallInfo:
        self._serving.__enter__()
        return self._call

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
                await abort(self._context, error, self._call.request_id)
        finally:
            self._serving.__exit__(None, None, None)
