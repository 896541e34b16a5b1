"""What a worker's engine is doing, as OpenTelemetry instruments that are read when they are exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

_SESSIONS = ("paceline.worker.sessions", "{session}", "Sessions by state.")


class EngineStats(Protocol):
    """What an engine tells of itself; all since it began, or now."""

    @property
    def sessions_open(self) -> int:
        """Sessions that hold a part of the KV cache."""

    @property
    def sessions_waiting(self) -> int:
        """Sessions that wait for one."""

    @property
    def requests_queued(self) -> int:
        """Requests that wait for a pass, or are in one."""

    @property
    def kv_reserved(self) -> int:
        """Tokens that sessions may grow to."""

    @property
    def kv_kept(self) -> int:
        """Tokens of prefixes kept for sessions to come."""

    @property
    def kv_size(self) -> int:
        """Tokens in all."""

    @property
    def passes(self) -> int:
        """Forward passes."""

    @property
    def positions(self) -> int:
        """Positions fed, over all sessions."""

    @property
    def shares(self) -> int:
        """Sessions served, summed over the passes."""

    @property
    def prefix_hits(self) -> int:
        """Sessions that began with a prefix from another's cache."""

    @property
    def reused_tokens(self) -> int:
        """Positions that they did not have to feed."""


def export_engine(read: Callable[[], EngineStats]) -> None:
    """Register a worker's instruments; `read` is called at every export.

    The mean batch size is the rate of `paceline.worker.pass.sessions` over that of `paceline.worker.passes`.
    """
    meter = metrics.get_meter("paceline.worker")

    def gauge(name: str, unit: str, description: str, values: Callable[[EngineStats], dict[str, int]]) -> None:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            # The empty state is that of an instrument with one value.
            return [Observation(value, {"state": state} if state else {}) for state, value in values(read()).items()]

        meter.create_observable_gauge(name, [observe], unit, description)

    def counter(name: str, unit: str, description: str, value: Callable[[EngineStats], int]) -> None:
        meter.create_observable_counter(name, [lambda _: [Observation(value(read()))]], unit, description)

    gauge(*_SESSIONS, lambda s: {"open": s.sessions_open, "waiting": s.sessions_waiting})
    gauge("paceline.worker.queue", "{request}", "Requests waiting or in a pass.", lambda s: {"": s.requests_queued})
    gauge(
        "paceline.worker.kv.tokens",
        "{token}",
        "Tokens of the KV cache by state.",
        lambda s: {"reserved": s.kv_reserved, "kept": s.kv_kept, "free": s.kv_size - s.kv_reserved - s.kv_kept},
    )
    counter("paceline.worker.passes", "{pass}", "Forward passes.", lambda s: s.passes)
    counter("paceline.worker.pass.sessions", "{session}", "Sessions served, summed over passes.", lambda s: s.shares)
    counter("paceline.worker.pass.tokens", "{token}", "Positions fed, summed over passes.", lambda s: s.positions)
    counter("paceline.worker.prefix.hits", "{session}", "Sessions that reused a prefix.", lambda s: s.prefix_hits)
    counter("paceline.worker.prefix.tokens", "{token}", "Positions not fed again.", lambda s: s.reused_tokens)


def export_sessions(read: Callable[[], int]) -> None:
    """Register the one instrument of a worker that runs no model: sessions open; none ever waits."""

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(read(), {"state": "open"}), Observation(0, {"state": "waiting"})]

    name, unit, description = _SESSIONS
    metrics.get_meter("paceline.worker").create_observable_gauge(name, [observe], unit, description)
