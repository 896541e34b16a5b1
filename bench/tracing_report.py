"""What tracing costs: tokens a second with every request sampled, with none, and without tracing."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Record
from bench.report import Table, interval
from bench.statistics import Interval
from bench.summary import chosen, median, names, ratio, whole_ms

OFF, UNSAMPLED, SAMPLED = "off", "none sampled", "all sampled"
_LEAST = 0.98


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a row for each mode, number of streams and system."""
    rows = []
    for mode in names(each.place.mode for each in records):
        for streams in sorted({each.place.streams for each in records}):
            here = chosen(records, mode=mode, streams=streams)
            base = chosen(here, system=OFF)
            for system in (OFF, UNSAMPLED, SAMPLED):
                found = chosen(here, system=system)
                times = ratio(base, found, whole_ms)
                if times is None:
                    continue
                verdicts = ("", "", "") if system == OFF else (f"{times.value:.3f}", interval(times), _verdict(times))
                rows.append((mode, f"{streams}", system, f"{1e3 / median(found, whole_ms):.1f}", *verdicts))
    headers = ("mode", "streams", "tracing", "tokens/s", "times as fast as off", "95% interval", "target")
    return [Table("The cost of tracing", headers, tuple(rows), labels=1)]


def _verdict(times: Interval) -> str:
    """Say whether a ratio is at least what is allowed; it is missed where the whole interval lies below."""
    if times.value >= _LEAST:
        return f"≥ {_LEAST}: met"
    return f"≥ {_LEAST}: {'within noise' if times.high >= _LEAST else 'missed'}"
