"""OpenTelemetry: on when the standard OTEL_ variables name an exporter, else nearly free.

Trace context travels in each message of a stream: metadata travels once a stream, rounds many times.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.specdec.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

# A collector that cannot be reached must not hold up a process that is to end.
_FLUSH_S = 2.0
_propagator = TraceContextTextMapPropagator()


class Traced(Protocol):
    """A message with W3C trace fields."""

    traceparent: str
    tracestate: str


def configure_telemetry(service_name: str, instance_id: str, metrics_listen: str = "") -> None:
    """Export traces and metrics over OTLP if the environment asks for it, and metrics on a page if the settings do.

    `OTEL_EXPORTER_OTLP_ENDPOINT` asks for both, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_TRACES_EXPORTER=otlp` for
    traces, the same with METRICS for metrics; an exporter `none` turns its signal off. `OTEL_SDK_DISABLED`, the
    samplers, headers and batch limits have their standard meaning. `OTEL_SERVICE_NAME` wins over `service_name`.

    Args:
        service_name: Which service this is.
        instance_id: Which of its processes.
        metrics_listen: HOST:PORT of a page that Prometheus reads; empty for none.

    Raises:
        StartupError: That address cannot be had.
    """
    traces, metrics_too = _asked_for("TRACES"), _asked_for("METRICS")
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if disabled or not (traces or metrics_too or metrics_listen):
        return
    # Imported here: the SDK and its exporters are a quarter of a second that an untraced process need not spend.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from services.common.rpc.sampling import SampledAsLinked

    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    resource = Resource.create({"service.name": name, "service.instance.id": instance_id})
    # Not shut down by the interpreter's exit, which would wait for an unreachable collector: see `flush_telemetry`.
    if traces:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.sampler = SampledAsLinked(provider.sampler)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    readers: list[MetricReader] = []
    if metrics_too:
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    if metrics_listen:
        readers.append(_metrics_page(metrics_listen))
    if readers:
        metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=readers, shutdown_on_exit=False))


def _metrics_page(listen: str) -> MetricReader:
    """Serve /metrics from a thread of its own: it answers while the event loop is busy."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import start_http_server

    host, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), host.strip("[]"))
    except (OSError, ValueError, OverflowError) as error:
        raise StartupError(f"--metrics-listen is {listen}: cannot listen there: {error}") from None
    return PrometheusMetricReader()


def _asked_for(signal: str) -> bool:
    if exporter := os.environ.get(f"OTEL_{signal}_EXPORTER", ""):
        return exporter == "otlp"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(os.environ.get(name) for name in endpoints)


def flush_telemetry() -> None:
    """Export what is still held, for two seconds at most; does nothing without an exporter."""
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    shutdowns = [provider.shutdown for provider in providers if hasattr(provider, "shutdown")]
    # Daemons: one that is left waiting for a collector ends with the process.
    threads = [threading.Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    give_up_s = time.monotonic() + _FLUSH_S
    for thread in threads:
        thread.join(max(0.0, give_up_s - time.monotonic()))


def traceparent(span: Span) -> str:
    """Return a span's context as a W3C header; empty where it has none."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def inject(span: Span, message: Traced) -> None:
    """Write a span's context into a message's trace fields."""
    if header := traceparent(span):
        # Once for each message of every request, sampled or not: written here and not by the propagator's carrier.
        message.traceparent = header
        message.tracestate = span.get_span_context().trace_state.to_header()


def extract(message: Traced) -> Context:
    """Return the context that a message's trace fields carry; malformed fields are ignored, as the standard says."""
    if not message.traceparent:
        return Context()
    return _propagator.extract({"traceparent": message.traceparent, "tracestate": message.tracestate}, Context())


def span_context(header: str) -> SpanContext:
    """Return the context that a W3C header names; an invalid one where it is malformed."""
    return trace.get_current_span(_propagator.extract({"traceparent": header}, Context())).get_span_context()


def extract_metadata(metadata: Mapping[str, str]) -> Context:
    """Return the context that a call's metadata carries."""
    return _propagator.extract(metadata, Context())
