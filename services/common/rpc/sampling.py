"""Which spans are kept: what the standard OTEL_TRACES_SAMPLER says, and a span of several requests as those are."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, TraceState, get_current_span, set_span_in_context
from opentelemetry.util.types import Attributes


class SampledAsLinked(Sampler):
    """Decides for a span without a parent that has links as if the first of them were its parent."""

    def __init__(self, inner: Sampler) -> None:
        self._inner = inner

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide; see `Sampler`."""
        if links and not get_current_span(parent_context).get_span_context().is_valid:
            parent_context = set_span_in_context(NonRecordingSpan(links[0].context), Context())
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return its name, and that of what it asks."""
        return f"SampledAsLinked{{{self._inner.get_description()}}}"
