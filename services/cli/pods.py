"""Tables of running pods: what they did between two readings of their metrics pages, and how they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from services.cli.pages import Page, Window

_ROUND = "paceline_round_duration_seconds"
_NOTHING = "–"


@dataclass
class Pod:
    """A pod as it was last seen.

    Attributes:
        address: Where its page is.
        before: The page of the reading before.
        page: The page of the last reading; None where it is down.
        error: Why it is down.
        known: What it was called while it was up.
    """

    address: str
    before: Page | None = None
    page: Page | None = None
    error: str = ""
    known: str = ""
    _last: Page | None = field(default=None, repr=False)

    def seen(self, page: Page) -> None:
        """Note a reading; what happened while the pod could not be read counts too."""
        self.before, self.page, self._last, self.error = self._last, page, page, ""
        self.known = f"{page.service} {page.instance}".strip()

    def missed(self, error: str) -> None:
        """Note that it could not be read."""
        self.page, self.error = None, error


class Column(NamedTuple):
    """A column: its title, what it shows, and how soon it goes where there is no room; 0 never."""

    title: str
    show: Callable[[Window], str]
    goes: int = 0


def _number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return _NOTHING if value is None else f"{value:{form}}{unit}"


def _share(part: float | None, whole: float | None) -> str:
    return _NOTHING if part is None or not whole else f"{part / whole:.0%}"


def _of(value: float | None, limit: float | None) -> str:
    return f"{_number(value)}/{_number(limit)}" if limit is not None else _number(value)


def _phase(name: str) -> Callable[[Window], str]:
    def show(window: Window) -> str:
        mean_s = window.ratio(f"{_ROUND}_sum", f"{_ROUND}_count", phase=name)
        return _number(None if mean_s is None else mean_s * 1e3, ",.1f")

    return show


def _round_p99(window: Window) -> str:
    seconds = window.quantile(0.99, f"{_ROUND}_bucket", phase="total")
    return _number(None if seconds is None else seconds * 1e3, ",.0f")


def _speed_up(window: Window) -> str:
    name = "paceline_speculation_time_seconds_total"
    alone, spent = window.grown(name, of="alone"), window.grown(name, of="spent")
    return _NOTHING if alone is None or not spent else f"{alone / spent:.2f}x"


def _kv(window: Window) -> str:
    name = "paceline_worker_kv_tokens"
    return _share(window.gauge(name, state="reserved"), window.gauge(name))


def _pass_ms(window: Window) -> str:
    seconds = window.ratio("paceline_worker_pass_time_seconds_total", "paceline_worker_passes_total")
    return _number(None if seconds is None else seconds * 1e3, ",.1f")


_COORDINATORS = (
    Column("running", lambda w: _of(w.gauge("paceline_requests_running"), w.gauge("paceline_requests_limit"))),
    Column("waiting", lambda w: _number(w.gauge("paceline_requests_waiting")), 2),
    Column("requests/s", lambda w: _number(w.rate("paceline_requests_ended_total"), ",.1f"), 4),
    Column("tokens/s", lambda w: _number(w.rate("paceline_tokens_emitted_total"), ",.1f")),
    Column(
        "alpha", lambda w: _number(w.ratio("paceline_tokens_accepted_total", "paceline_tokens_tested_total"), ".2f")
    ),
    Column("gamma", lambda w: _number(w.ratio("paceline_tokens_asked_total", "paceline_rounds_total"), ".1f")),
    Column("a pass", lambda w: _number(w.ratio("paceline_tokens_emitted_total", "paceline_rounds_total"), ".2f"), 3),
    Column("speed-up", _speed_up, 7),
    Column(
        "degraded", lambda w: _share(w.grown("paceline_rounds_degraded_total"), w.grown("paceline_rounds_total")), 6
    ),
    Column("draft ms", _phase("draft"), 8),
    Column("verify ms", _phase("verify"), 8),
    Column("accept ms", _phase("accept"), 9),
    Column("wire ms", _phase("wire"), 9),
    Column("round ms", _phase("total"), 1),
    Column("p99 ms", _round_p99, 5),
)
_WORKERS = (
    Column(
        "sessions",
        lambda w: _of(w.gauge("paceline_worker_sessions", state="open"), w.gauge("paceline_worker_sessions_limit")),
    ),
    Column("waiting", lambda w: _number(w.gauge("paceline_worker_sessions", state="waiting")), 2),
    Column("queue", lambda w: _number(w.gauge("paceline_worker_queue"))),
    Column("cache", _kv, 1),
    Column("at work", lambda w: _number(w.rate("paceline_worker_pass_time_seconds_total"), ".0%")),
    Column("passes/s", lambda w: _number(w.rate("paceline_worker_passes_total"), ",.1f"), 4),
    Column("pass ms", _pass_ms, 3),
    Column(
        "in a pass",
        lambda w: _number(w.ratio("paceline_worker_pass_sessions_total", "paceline_worker_passes_total"), ".2f"),
        5,
    ),
    Column("positions/s", lambda w: _number(w.rate("paceline_worker_pass_tokens_total"), ",.0f"), 6),
    Column("bad rows", lambda w: _number(w.grown("paceline_worker_rows_bad_total")), 7),
)


def pods_view(pods: Sequence[Pod], console: Console) -> RenderableType:
    """Return the tables of all pods: coordinators, workers, and what is down."""
    up = [pod for pod in pods if pod.page is not None]
    coordinators = [pod for pod in up if pod.page is not None and pod.page.is_coordinators]
    workers = [pod for pod in up if pod not in coordinators]
    parts: list[RenderableType] = []
    if coordinators:
        parts.append(_fitting("coordinators", _COORDINATORS, coordinators, console))
    if workers:
        parts.append(_fitting("workers", _WORKERS, workers, console))
    parts += [_down(pod) for pod in pods if pod.page is None]
    return Group(*parts)


def _down(pod: Pod) -> Text:
    who = f"{pod.address}, {pod.known}," if pod.known else pod.address
    return Text(f"{who} is down: {pod.error}", style="red")


def _fitting(title: str, columns: Sequence[Column], pods: Sequence[Pod], console: Console) -> Table:
    """Return a table as wide as there is room: the columns that one can do without go first."""
    # Asked within the console's own width, no table says that it needs more.
    unbounded = console.options.update(max_width=10_000)
    while True:
        table = _table(title, columns, pods)
        most = max(column.goes for column in columns)
        if not most or Measurement.get(console, unbounded, table).maximum <= console.width:
            return table
        columns = [column for column in columns if column.goes < most]


def _table(title: str, columns: Sequence[Column], pods: Sequence[Pod]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("pod", no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for pod in pods:
        table.add_row(_name(pod), *(column.show(_window([pod])) for column in columns))
    if len(pods) > 1 and title == "coordinators":
        table.add_section()
        table.add_row("all", *(column.show(_window(pods)) for column in columns), style="bold")
    return table


def _name(pod: Pod) -> str:
    assert pod.page is not None
    role = pod.page.service.removeprefix("paceline-").removesuffix("-worker")
    name = pod.page.instance or pod.address
    return name if role == "coordinator" else f"{name} ({role})"


def _window(pods: Sequence[Pod]) -> Window:
    return Window([(pod.before or pod.page, pod.page) for pod in pods if pod.page is not None])
