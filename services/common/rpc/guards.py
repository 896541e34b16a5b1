"""Who may call a server: interceptors that refuse a call before its handler knows of it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health
from opentelemetry import metrics

from services.common.rpc.errors import Context
from services.common.rpc.tally import Tally
from services.common.rpc.tokens import Tokens

log = logging.getLogger(__name__)

Details: TypeAlias = grpc.HandlerCallDetails
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Continuation: TypeAlias = Callable[[Details], Awaitable[Handler]]

_refused = Tally(
    metrics.get_meter("paceline.server").create_observable_counter,
    *("paceline.server.refused", "{call}", "Calls refused before their handler, by gRPC status."),
    ("status",),
    [("UNAUTHENTICATED",), ("PERMISSION_DENIED",)],
)

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
# Names of refused callers that are remembered, so that one who tries again and again is logged once.
_REMEMBERED = 100


class CallerNames(grpc.aio.ServerInterceptor):
    """Lets in callers whose certificate has one of some names; the others get PERMISSION_DENIED.

    A name is a subject alternative name, of DNS or a URI (SPIFFE), and is compared as it is: no wildcards. That the
    certificate is good at all is the handshake's business. Health is told to all: a channel that is refused it says
    only that nobody serves, and not why.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self._refused: set[frozenset[str]] = set()

    async def intercept_service(self, continuation: Continuation, handler_call_details: Details) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler = await continuation(handler_call_details)
        if handler is None or is_health(handler_call_details):
            return handler
        # Who calls is known to the call's context only, which is there when the handler is called.
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        changed: Handler = handler._replace(**{kind: self._guarded(getattr(handler, kind))})  # type: ignore[attr-defined]
        return changed

    def _guarded(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def replies(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._check(context)
                async for reply in behaviour(request, context):
                    yield reply

            return replies

        async def answer(request: Any, context: Context) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        return answer

    async def _check(self, context: Context) -> None:
        names = names_of(context)
        if names & self._allowed:
            return
        told = f"a certificate of {', '.join(sorted(names)) or 'no name'} may not call this (--tls-clients)"
        if names not in self._refused and len(self._refused) < _REMEMBERED:
            self._refused.add(names)
            log.warning("refused, and so are further calls of the same: %s", told)
        await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, told)


class BearerTokens(grpc.aio.ServerInterceptor):
    """Lets in calls with a known bearer token in their metadata; the others get UNAUTHENTICATED, before they are read.

    Health is told to all: channels that watch it have no token to send.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Continuation, handler_call_details: Details) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        if is_health(handler_call_details):
            return await continuation(handler_call_details)
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == "authorization"]
        if len(shown) != 1:
            return _refusing(f"{len(shown) or 'no'} authorization in the metadata: must be one, `Bearer TOKEN`")
        scheme, _, token = str(shown[0]).partition(" ")
        if scheme.lower() != "bearer" or not self._tokens.accept(token.strip()):
            return _refusing("the authorization in the metadata is no known `Bearer TOKEN`")
        return await continuation(handler_call_details)


async def _refuse(context: Context, status: grpc.StatusCode, told: str) -> None:
    _refused.add(1, status.name)
    await context.abort(status, told)


def _refusing(told: str) -> Handler:
    """Return a handler for calls of every kind: it asks for no message."""

    async def refuse(requests: object, context: Context) -> None:  # noqa: ARG001
        await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, told)

    made: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return made


def is_health(details: Details) -> bool:
    """Return whether a call asks for health."""
    return details.method.startswith(f"/{health.SERVICE_NAME}/")


def names_of(context: Context) -> frozenset[str]:
    """Return the names in the certificate that the caller has shown; none where it has shown none."""
    shown = context.auth_context()
    return frozenset(name.decode(errors="replace") for key in ("peer_dns", "peer_uri") for name in shown.get(key, ()))
