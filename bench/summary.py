"""From measurements to figures: pairs of systems, medians, and what the rounds were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.phases import OWN, PHASES
from bench.record import Record, Rounds
from bench.statistics import Interval, paired_ratio

Value = Callable[[Record], float]
FLOOR = 0.97
"""What counts as not slower."""


def whole_ms(record: Record) -> float:
    """Return the milliseconds a token of the whole answer, its prompt's pass included."""
    return record.wall_ms / record.tokens


def decode_ms(record: Record) -> float:
    """Return the milliseconds a token after the first tokens of an answer."""
    return record.decode_ms / record.decode_tokens if record.decode_tokens else record.wall_ms / record.tokens


def chosen(
    records: Iterable[Record],
    *,
    mode: str | None = None,
    system: str | None = None,
    category: str | None = None,
    streams: int | None = None,
) -> list[Record]:
    """Return the records that are of all that is given."""
    return [
        each
        for each in records
        if mode in (None, each.place.mode)
        and system in (None, each.system)
        and category in (None, each.place.category)
        and streams in (None, each.place.streams)
    ]


def names(values: Iterable[str]) -> list[str]:
    """Return the different ones in order of appearance."""
    return list(dict.fromkeys(values))


def median(records: Iterable[Record], value: Value) -> float:
    """Return the median over units of the median over repeats."""
    return float(np.median([np.median(values) for values in _by_unit(records, value).values()]))


def ratio(numerator: Iterable[Record], denominator: Iterable[Record], value: Value) -> Interval | None:
    """Return how much larger a value is than another, paired by unit and repeat; None where there is no pair.

    A repeat that some unit does not have yet is left out.
    """
    above, below = grid(numerator, value), grid(denominator, value)
    units = [unit for unit in above if unit in below]
    if not units:
        return None
    repeats = min(min(len(above[unit]), len(below[unit])) for unit in units)
    return paired_ratio(
        np.array([above[unit][:repeats] for unit in units]), np.array([below[unit][:repeats] for unit in units])
    )


def total_ratio(numerator: Iterable[Record], denominator: Iterable[Record], value: Value) -> float:
    """Return the ratio of the sums over units of the medians over repeats: of a run's whole time."""
    above, below = grid(numerator, value), grid(denominator, value)
    units = [unit for unit in above if unit in below]
    return float(sum(np.median(above[unit]) for unit in units) / sum(np.median(below[unit]) for unit in units))


def grid(records: Iterable[Record], value: Value) -> dict[tuple[str, str, int], npt.NDArray[np.float64]]:
    """Return the values of each unit, mode and number of streams by repeat."""
    return {unit: np.array(values) for unit, values in _by_unit(records, value).items()}


def sums(records: Iterable[Record]) -> Rounds | None:
    """Return the rounds of all records together; None where there are none."""
    rounds = [each.rounds for each in records if each.rounds is not None]
    if not rounds:
        return None
    values: dict[str, Any] = {}
    for name in Rounds.__slots__:
        each: list[Any] = [getattr(one, name) for one in rounds]
        if name == "ms":
            values[name] = {phase: sum(ms[phase] for ms in each) for phase in PHASES}
        else:
            values[name] = _added(each) if isinstance(each[0], tuple) else sum(each)
    return Rounds(**values)


def alpha(rounds: Rounds | None) -> float | None:
    """Return the drafts kept over the drafts tested; None where none were."""
    tested = 0 if rounds is None else sum(rounds.tested)
    return sum(rounds.accepted) / tested if rounds is not None and tested else None


def own_ms(rounds: Rounds) -> float:
    """Return what a round costs besides the passes, mean."""
    return sum(rounds.ms[name] for name in OWN) / rounds.rounds


def round_ms(rounds: Rounds) -> float:
    """Return the time of a round, and to the next one, mean."""
    return sum(rounds.ms.values()) / rounds.rounds


def _by_unit(records: Iterable[Record], value: Value) -> dict[tuple[str, str, int], list[float]]:
    found: dict[tuple[str, str, int], list[float]] = {}
    for each in sorted(records, key=lambda each: each.place.repeat):
        place = each.place
        found.setdefault((place.unit, place.mode, place.streams), []).append(value(each))
    return found


def _added(lists: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(len(each) for each in lists)
    return tuple(sum(each[i] for each in lists if i < len(each)) for i in range(longest))
