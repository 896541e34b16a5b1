"""What a worker's engine is doing, as OpenTelemetry instruments that are read when they are exported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from opentelemetry import metrics
from opentelemetry.metrics import Observation

from services.common.rpc.tally import observe


class EngineStats(Protocol):
    """What an engine tells of itself; all since it began, or now."""

    @property
    def sessions_open(self) -> int:
        """Sessions that hold a part of the KV cache."""

    @property
    def sessions_waiting(self) -> int:
        """Sessions that wait for one."""

    @property
    def sessions_limit(self) -> int:
        """Most that may be open."""

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

    @property
    def pass_s(self) -> float:
        """Time in passes."""

    @property
    def bad_rows(self) -> int:
        """Rows of logits that were not finite."""


def export_engine(read: Callable[[], EngineStats]) -> None:
    """Register a worker's instruments; `read` is called at every export.

    The mean batch size is the rate of `paceline.worker.pass.sessions` over that of `paceline.worker.passes`.
    """
    meter = metrics.get_meter("paceline.worker")

    def gauge(name: str, unit: str, description: str, value: Callable[[EngineStats], int]) -> None:
        observe(meter.create_observable_gauge, name, unit, description, lambda: [Observation(value(read()))])

    def counter(name: str, unit: str, description: str, value: Callable[[EngineStats], float]) -> None:
        observe(meter.create_observable_counter, name, unit, description, lambda: [Observation(value(read()))])

    def kv_tokens() -> Iterable[Observation]:
        stats = read()
        free = stats.kv_size - stats.kv_reserved - stats.kv_kept
        return _by_state({"reserved": stats.kv_reserved, "kept": stats.kv_kept, "free": free})

    _export_sessions(lambda: ((stats := read()).sessions_open, stats.sessions_waiting, stats.sessions_limit))
    told = "Tokens of the KV cache by state."
    observe(meter.create_observable_gauge, "paceline.worker.kv.tokens", "{token}", told, kv_tokens)
    gauge("paceline.worker.queue", "{request}", "Requests waiting or in a pass.", lambda s: s.requests_queued)
    counter("paceline.worker.passes", "{pass}", "Forward passes.", lambda s: s.passes)
    counter(
        "paceline.worker.pass.time", "s", "Time in passes: its rate is the share of time at work.", lambda s: s.pass_s
    )
    counter("paceline.worker.pass.sessions", "{session}", "Sessions served, summed over passes.", lambda s: s.shares)
    counter("paceline.worker.pass.tokens", "{token}", "Positions fed, summed over passes.", lambda s: s.positions)
    counter("paceline.worker.prefix.hits", "{session}", "Sessions that reused a prefix.", lambda s: s.prefix_hits)
    counter("paceline.worker.prefix.tokens", "{token}", "Positions not fed again.", lambda s: s.reused_tokens)
    counter("paceline.worker.rows.bad", "{row}", "Rows of logits that were not finite.", lambda s: s.bad_rows)


def export_sessions(read: Callable[[], int], limit: int) -> None:
    """Register the instruments of a worker that runs no model: sessions open, of how many; none ever waits.

    Args:
        read: Returns how many are open; called at every export.
        limit: Most that may be.
    """
    _export_sessions(lambda: (read(), 0, limit))


def export_outgrown(read: Callable[[], int]) -> None:
    """Register what a drafter that is fed with hidden states counts.

    Args:
        read: Returns how many sessions have outgrown their range so far; called at every export.
    """
    counter = metrics.get_meter("paceline.worker").create_observable_counter
    told = "Sessions that drafted no more, their range of the KV cache being full."
    observe(counter, "paceline.worker.sessions.outgrown", "{session}", told, lambda: [Observation(read())])


def _export_sessions(read: Callable[[], tuple[int, int, int]]) -> None:
    """Register sessions open, waiting, and the most that may be open."""
    gauge = metrics.get_meter("paceline.worker").create_observable_gauge

    def sessions() -> Iterable[Observation]:
        is_open, waiting, _ = read()
        return _by_state({"open": is_open, "waiting": waiting})

    observe(gauge, "paceline.worker.sessions", "{session}", "Sessions by state.", sessions)
    told = "Sessions served at once."
    observe(gauge, "paceline.worker.sessions.limit", "{session}", told, lambda: [Observation(read()[2])])


def _by_state(values: Mapping[str, int]) -> list[Observation]:
    return [Observation(value, {"state": state}) for state, value in values.items()]
