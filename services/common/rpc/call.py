"""The call that a handler serves: its request and its trace, for whatever works for it.

A `CallInfo` is in the context of the handler's task. Tasks and threads that it starts inherit that context, so what
they log and the passes that they wait for are told of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import Context, ContextVar
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

# The last bit of the last field of a traceparent.
_SAMPLED = frozenset("13579bdf")


@dataclass
class CallInfo:
    """What is known of a call so far.

    Attributes:
        request_id: Of the request, as the client knows it.
        traceparent: W3C trace context of the span that the call is in now; empty where there is none.
        passes: Spans of the passes that what it asked for last had a part in, while it is sampled.
    """

    request_id: str = "-"
    traceparent: str = ""
    passes: list[SpanContext] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Whether its trace is exported."""
        return self.traceparent[-1:] in _SAMPLED

    def enter(self, traceparent: str) -> None:
        """Go on in another span."""
        self.traceparent = traceparent
        self.passes.clear()


_call: ContextVar[CallInfo] = ContextVar("paceline_call")


@contextlib.contextmanager
def serving(call: CallInfo) -> Iterator[None]:
    """Make a call the current one."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


def current_call(context: Context | None = None) -> CallInfo | None:
    """Return the call of a context, None where it is of none; by default of the one that this runs in."""
    return _call.get(None) if context is None else context.get(_call)
