"""Bytes and alpha of each way to send rows and to draft."""

from __future__ import annotations

from collections.abc import Sequence

from bench.record import Record
from bench.report import Table, interval, met, not_slower
from bench.summary import alpha, chosen, decode_ms, names, ratio, round_ms, sums

DENSE, THIN, COUPLED = "whole q, dense rows", "whole q, thin rows", "whole q, thin rows, COUPLED"
_MOST_BYTES = 0.05


def top_k(k: int) -> str:
    """Return the name of drafting from the k likeliest tokens."""
    return f"q of {k}, thin rows"


def tables(records: Sequence[Record]) -> list[Table]:
    """Return bytes a round, alpha and time, each kind against dense rows and a whole q under the plain rule."""
    rows = []
    for mode in names(each.place.mode for each in records):
        here = chosen(records, mode=mode)
        base, dense = chosen(here, system=DENSE), sums(chosen(here, system=DENSE))
        for system in names(each.system for each in sorted(here, key=lambda each: _rank(each.system))):
            found = chosen(here, system=system)
            rounds, times = sums(found), ratio(base, found, decode_ms)
            kept = alpha(rounds)
            if rounds is None or dense is None or times is None:
                continue
            # A row of p by itself: kinds differ in how many drafts they verify.
            share = (rounds.p_bytes / rounds.p_rows) / (dense.p_bytes / dense.p_rows)
            verdicts = (
                ("", "") if system == DENSE else (met(share <= _MOST_BYTES, f"≤ {_MOST_BYTES:.0%}"), not_slower(times))
            )
            rows.append(
                (
                    *(mode, system, f"{rounds.p_bytes / rounds.rounds / 1e3:.1f}", f"{share:.1%}", verdicts[0]),
                    *(f"{rounds.q_bytes / rounds.rounds / 1e3:.1f}", f"{rounds.fetched_rows / rounds.rounds:.1%}"),
                    *("" if kept is None else f"{kept:.3f}", f"{round_ms(rounds):.1f}"),
                    *(f"{times.value:.2f}", interval(times), verdicts[1]),
                )
            )
    bytes_of = ("p kB a round", "a row of p to dense", "target", "q kB a round", "rounds with a fetch")
    headers = ("mode", "kind", *bytes_of, "alpha", "round ms", "times as fast as dense", "95% interval", "target")
    return [Table("Bytes and alpha", headers, tuple(rows))]


def _rank(system: str) -> int:
    return [DENSE, THIN].index(system) if system in (DENSE, THIN) else 3 if system == COUPLED else 2
