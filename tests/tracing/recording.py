"""Spans of this process: what is exported, and how many were begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, SamplingResult, TraceIdRatioBased

from services.common.rpc.sampling import SampledAsLinked


class Counting(Sampler):
    """Asked once for each span that is begun, sampled or not."""

    def __init__(self, inner: Sampler) -> None:
        self.asked = 0
        self._inner = inner

    def should_sample(self, *arguments: Any, **named: Any) -> SamplingResult:
        self.asked += 1
        return self._inner.should_sample(*arguments, **named)

    def get_description(self) -> str:
        return "counting"


class Recording:
    """A provider that samples a share of the requests whose client has not decided.

    Attributes:
        provider: Of tracers.
    """

    def __init__(self, ratio: float) -> None:
        self._exporter = InMemorySpanExporter()
        self._sampler = Counting(SampledAsLinked(ParentBased(TraceIdRatioBased(ratio))))
        self.provider = TracerProvider(sampler=self._sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def begun(self) -> int:
        """Spans begun so far, those that are not sampled too."""
        return self._sampler.asked

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Spans that have ended and were exported."""
        return self._exporter.get_finished_spans()
