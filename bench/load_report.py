"""The tables of `python -m bench coordinator`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.load import Spent
from bench.load_profile import Shares
from bench.report import Table

SPARSE_AT_LEAST = 1000.0
TIMES_DENSE = 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """What one process spent in one window.

    Attributes:
        name: Of the process: "coordinator", or "relay", which is its floor.
        rows: "dense" or "sparse".
        streams: Concurrent answers.
        spent: In the window.
    """

    name: str
    rows: str
    streams: int
    spent: Spent


def tables(windows: Sequence[Window], profiles: Sequence[Shares]) -> list[Table]:
    """Return the tables."""
    return [_rounds(windows), _parts(profiles)]


def _rounds(windows: Sequence[Window]) -> Table:
    headers = (
        *("rows", "streams", "rounds a CPU-second", "least to most", "rounds/s", "CPU ms a round", "event loop"),
        *("floor, rounds a CPU-second", "tokens a round", "alpha", "target"),
    )
    lines = []
    for rows, streams in dict.fromkeys((each.rows, each.streams) for each in windows):
        ours = _spent(windows, "coordinator", rows, streams)
        rates = [_rate(each) for each in ours]
        lines.append(
            (
                rows,
                f"{streams}",
                f"{np.median(rates):.0f}",
                f"{min(rates):.0f} to {max(rates):.0f}",
                f"{_median(ours, lambda each: each.rounds / each.wall_s):.0f}",
                f"{_median(ours, lambda each: each.cpu_s / each.rounds * 1e3):.2f}",
                f"{_median(ours, lambda each: each.loop_s / each.cpu_s):.0%}",
                f"{_median(_spent(windows, 'relay', rows, streams), _rate):.0f}",
                f"{_median(ours, lambda each: each.tokens / each.rounds):.2f}",
                f"{_median(ours, lambda each: each.accepted / (each.accepted + each.rejected)):.2f}",
                _verdict(windows, rows, streams),
            )
        )
    return Table("Rounds that a second of the coordinator's CPU time pays for, medians", headers, tuple(lines))


def _parts(profiles: Sequence[Shares]) -> Table:
    names = dict.fromkeys(part for profile in profiles for part in profile.parts)
    lines = ((name, *(f"{profile.parts.get(name, 0.0):.0%}" for profile in profiles)) for name in names)
    headers = ("part", *(f"{profile.rows} rows" for profile in profiles))
    return Table("Where the event loop's time goes, under a profiler", headers, tuple(lines), labels=1)


def _verdict(windows: Sequence[Window], rows: str, streams: int) -> str:
    if rows != "sparse":
        return ""
    rate = _median(_spent(windows, "coordinator", rows, streams), _rate)
    times = rate / _median(_spent(windows, "coordinator", "dense", streams), _rate)
    met = rate >= SPARSE_AT_LEAST and times >= TIMES_DENSE
    return f"≥ {SPARSE_AT_LEAST:.0f}, ≥ {TIMES_DENSE:g} times dense ({times:.1f}): {'met' if met else 'missed'}"


def _spent(windows: Iterable[Window], name: str, rows: str, streams: int) -> list[Spent]:
    return [each.spent for each in windows if (each.name, each.rows, each.streams) == (name, rows, streams)]


def _rate(spent: Spent) -> float:
    return spent.rounds / spent.cpu_s


def _median(spent: Sequence[Spent], value: Callable[[Spent], float]) -> float:
    return float(np.median([value(each) for each in spent]))
