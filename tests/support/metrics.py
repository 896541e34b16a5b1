"""Metrics of a service in this process, read when they are asked for."""

from __future__ import annotations

from typing import Any

from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


class Readings:
    """What instruments say.

    Attributes:
        meter: For the service.
    """

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.meter: Meter = self._provider.get_meter("test")

    def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        """Return a metric's points by the values of their attributes; none where nothing was noted yet."""
        data = self._reader.get_metrics_data()
        return {
            tuple(point.attributes.values()): point
            for group in (data.resource_metrics if data else ())
            for scope in group.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        }

    def values(self, name: str) -> dict[tuple[Any, ...], float]:
        """Return a counter's or gauge's values by the values of their attributes."""
        return {labels: point.value for labels, point in self.points(name).items()}

    def total(self, name: str) -> float:
        """Return their sum."""
        return sum(self.values(name).values())
