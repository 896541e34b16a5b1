"""Spans of the passes that sampled requests share.

A pass belongs to no one of them, so it is a trace of its own. Its span links to the spans of its requests, and each
request's `paceline.forward` links to it.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link

from services.common.rpc.call import current_call
from services.common.rpc.telemetry import span_context

MOST_LINKS: Final = 32
"""Of a span: links are what makes it large."""

_tracer = trace.get_tracer("paceline.worker")


def trace_pass(callers: Sequence[contextvars.Context], elapsed_s: float, positions: int) -> None:
    """Record a pass that has just ended, if more than one request shares it and one of them is sampled.

    Args:
        callers: The contexts of those who asked for its parts.
        elapsed_s: What it took.
        positions: Fed in it, of all its parts.
    """
    if len(callers) < 2:
        return
    calls = [call for caller in callers if (call := current_call(caller)) is not None and call.is_sampled]
    if not calls:
        return
    ended_ns = time.time_ns()
    span = _tracer.start_span(
        "paceline.pass",
        Context(),
        links=[Link(span_context(call.traceparent)) for call in calls[:MOST_LINKS]],
        attributes={
            "paceline.pass.sessions": len(callers),
            "paceline.pass.sampled": len(calls),
            "paceline.pass.tokens": positions,
        },
        start_time=ended_ns - int(elapsed_s * 1e9),
    )
    span.end(ended_ns)
    if span.get_span_context().trace_flags.sampled:
        for call in calls:
            if len(call.passes) < MOST_LINKS:
                call.passes.append(span.get_span_context())
