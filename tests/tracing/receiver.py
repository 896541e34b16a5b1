"""An OTLP collector inside the test: a real gRPC server that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

ARRIVAL_TIMEOUT_S = 30.0
T = TypeVar("T")
Attributes = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A span as it arrived; times are nanoseconds of the epoch, links are the trace and span ids of others."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: Attributes
    resource: Attributes
    links: tuple[tuple[str, str], ...]

    @property
    def service(self) -> str:
        """Which process it is from."""
        return str(self.resource["service.name"])

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


class Receiver:
    """Serves OTLP on a free port.

    Attributes:
        endpoint: For OTEL_EXPORTER_OTLP_ENDPOINT.
        texts: Every span that has arrived, whole: its events and messages too.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[Span] = []
        self.texts: list[str] = []
        self._metrics: dict[tuple[str, str], Metric] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop(None)

    def trace(self, trace_id: str, spans: int) -> list[Span]:
        """Return a trace once that many of its spans have arrived."""
        return self._when(
            lambda: found if len(found := self.spans_of(trace_id)) >= spans else None, f"{spans} spans of {trace_id}"
        )

    def span(self, name: str, **attributes: Any) -> Span:
        """Return the span with a name and, among others, these attributes (dots written as __), once it has arrived."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        return self._when(
            lambda: next((s for s in self._spans if s.name == name and wanted.items() <= s.attributes.items()), None),
            f"{name} with {wanted}",
        )

    def spans_of(self, trace_id: str) -> list[Span]:
        """Return what has arrived of a trace."""
        return [span for span in self._spans if span.trace_id == trace_id]

    def metric(self, service: str, name: str, is_awaited: Callable[[Metric], bool] = lambda _: True) -> Metric:
        """Return the latest state of a service's metric, once it has arrived and is the awaited one."""

        def found() -> Metric | None:
            metric = self._metrics.get((service, name))
            return metric if metric is not None and is_awaited(metric) else None

        return self._when(found, f"{name} of {service}")

    def metrics(self) -> list[Metric]:
        """Return the latest state of every metric of every service."""
        return list(self._metrics.values())

    def services(self) -> set[str]:
        """Return the services that spans have arrived from."""
        return {span.service for span in self._spans}

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Take spans in."""
        with self._arrived:
            self._spans += spans
            self._arrived.notify_all()

    def add_metrics(self, service: str, metrics: Iterable[Metric]) -> None:
        """Take metrics in; they are sums since the process began, so the latest counts."""
        with self._arrived:
            self._metrics |= {(service, metric.name): metric for metric in metrics}
            self._arrived.notify_all()

    def _when(self, found: Callable[[], T | None], what: str) -> T:
        end_s = time.monotonic() + ARRIVAL_TIMEOUT_S
        with self._arrived:
            while (result := found()) is None:
                left_s = end_s - time.monotonic()
                names = sorted({span.name for span in self._spans})
                assert left_s > 0, f"no {what} among {len(self._spans)} spans named {names}"
                self._arrived.wait(left_s)
        return result


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            spans = [span for scope in group.scope_spans for span in scope.spans]
            self._receiver.texts += map(str, spans)
            self._receiver.add_spans(
                Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    status=span.status.code,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )
                for span in spans
            )
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_metrics:
            service = _attributes(group.resource.attributes)["service.name"]
            self._receiver.add_metrics(service, [metric for scope in group.scope_metrics for metric in scope.metrics])
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
