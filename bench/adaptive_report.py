"""The gamma that the service chooses, held against the best fixed one and against 0."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Record
from bench.report import Table, interval, not_slower
from bench.summary import chosen, median, names, ratio, sums, whole_ms

ADAPTIVE = "adaptive"
_ALONE = "gamma 0"


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the verdict for each mode, number of streams and category.

    The best fixed gamma is the one with the least median of noisy times: it looks a little better than it is.
    """
    rows = []
    for mode in names(each.place.mode for each in records):
        for streams in sorted({each.place.streams for each in records}):
            for category in names(each.place.category for each in records):
                here = chosen(records, mode=mode, category=category, streams=streams)
                if row := _row(here):
                    rows.append((mode, f"{streams}", category, *row))
    verdicts = ("to the best", "95% interval", "target", "to gamma 0", "95% interval", "target")
    headers = ("mode", "streams", "category", "best fixed", "tokens/s", "adaptive", "mean gamma", *verdicts)
    return [Table("Gamma chosen by the service, against each fixed gamma", headers, tuple(rows), labels=3)]


def best_fixed(here: Sequence[Record]) -> str | None:
    """Return the fixed gamma with the least time a token; None where there is none."""
    fixed = [name for name in names(each.system for each in here) if name != ADAPTIVE]
    return min(fixed, key=lambda name: median(chosen(here, system=name), whole_ms), default=None)


def _row(here: Sequence[Record]) -> tuple[str, ...]:
    best = best_fixed(here)
    mine = chosen(here, system=ADAPTIVE)
    if best is None or not mine:
        return ()
    against_best = ratio(chosen(here, system=best), mine, whole_ms)
    against_none = ratio(chosen(here, system=_ALONE), mine, whole_ms)
    rounds = sums(mine)
    if against_best is None or against_none is None or rounds is None:
        return ()
    speeds = (f"{1e3 / median(each, whole_ms):.1f}" for each in (chosen(here, system=best), mine))
    mean = sum(gamma * count for gamma, count in enumerate(rounds.gammas)) / rounds.rounds
    verdicts = ((f"{times.value:.2f}", interval(times), not_slower(times)) for times in (against_best, against_none))
    return (best, *speeds, f"{mean:.1f}", *(word for verdict in verdicts for word in verdict))
