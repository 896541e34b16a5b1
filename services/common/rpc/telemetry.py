"""OpenTelemetry: on when the standard OTEL_ variables name an exporter, else nearly free.

Trace context travels in each message of a stream: metadata travels once a stream, rounds many times.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_propagator = TraceContextTextMapPropagator()


class Traced(Protocol):
    """A message with W3C trace fields."""

    traceparent: str
    tracestate: str


def configure_telemetry(service_name: str, instance_id: str) -> None:
    """Export traces and metrics over OTLP if the environment asks for it.

    `OTEL_EXPORTER_OTLP_ENDPOINT` (or the one for traces or metrics), or `OTEL_TRACES_EXPORTER=otlp`, switches it on;
    `OTEL_SDK_DISABLED`, the samplers, headers and batch limits have their standard meaning. `OTEL_SERVICE_NAME` wins
    over `service_name`.
    """
    asked = os.environ.get("OTEL_TRACES_EXPORTER", "") == "otlp" or any(os.environ.get(name) for name in _ENDPOINTS)
    if not asked or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    # Imported here: the SDK and its exporters are a quarter of a second that an untraced process need not spend.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    resource = Resource.create({"service.name": name, "service.instance.id": instance_id})
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp":
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    if os.environ.get("OTEL_METRICS_EXPORTER", "otlp") == "otlp":
        readers = [PeriodicExportingMetricReader(OTLPMetricExporter())]
        metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=readers))


def flush_telemetry() -> None:
    """Export what is still held; does nothing without an exporter."""
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        shutdown = getattr(provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def inject(span: Span, message: Traced) -> None:
    """Write a span's context into a message's trace fields."""
    if not span.get_span_context().is_valid:
        return
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    message.traceparent = carrier.get("traceparent", "")
    message.tracestate = carrier.get("tracestate", "")


def extract(message: Traced) -> Context:
    """Return the context that a message's trace fields carry; malformed fields are ignored, as the standard says."""
    if not message.traceparent:
        return Context()
    return _propagator.extract({"traceparent": message.traceparent, "tracestate": message.tracestate}, Context())


def extract_metadata(metadata: Mapping[str, str]) -> Context:
    """Return the context that a call's metadata carries."""
    return _propagator.extract(metadata, Context())
