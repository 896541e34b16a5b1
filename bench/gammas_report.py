"""Measured speed-up at each gamma, and the formula's (Leviathan et al. 2023, theorem 3.8) beside it.

    (1 - alpha^(gamma + 1)) / (1 - alpha) / (gamma c + 1 + r)

The unit is a round of gamma = 0, as the service runs it. alpha is drafts kept over drafts tested at this gamma; c the
draft's passes over the drafts proposed; r what a round costs besides the passes, over that of a round of gamma = 0.
What the formula leaves out, and the measurement has: a target pass over gamma + 1 positions takes longer than over
one, later drafts are kept less often, and a round may have fewer drafts than it was meant to have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.record import Record, Rounds
from bench.report import Table, interval, met
from bench.statistics import Interval
from bench.summary import alpha, chosen, decode_ms, names, ratio, round_ms, sums
from services.common.specdec.analysis import expected_speedup, expected_tokens

_LEAST_SHARE = 0.9
_PASSES = ("draft pass", "target pass")


@dataclass(frozen=True, slots=True)
class Point:
    """One gamma in one mode.

    Attributes:
        mode: Key of MODES.
        gamma: Drafts in a round.
        alpha: Drafts kept over drafts tested.
        tokens: Of a round, mean.
        draft_cost: c.
        wire_cost: r.
        pass_cost: The target's pass over that of gamma 0.
        measured: Times as fast as gamma 0, after an answer's first tokens.
    """

    mode: str
    gamma: int
    alpha: float
    tokens: float
    draft_cost: float
    wire_cost: float
    pass_cost: float
    measured: Interval

    @property
    def formula(self) -> float:
        """The speed-up that it should give."""
        return expected_speedup(self.alpha, self.gamma, self.draft_cost, self.wire_cost)


def name(gamma: int) -> str:
    """Return the name of a system of fixed gamma."""
    return f"gamma {gamma}"


def points(records: Sequence[Record]) -> Iterator[Point]:
    """Yield the points of all modes that have a gamma of 0 to be held against."""
    for mode in names(each.place.mode for each in records):
        here = chosen(records, mode=mode)
        alone = chosen(here, system=name(0))
        base = sums(alone)
        for gamma in sorted(int(each.split()[1]) for each in names(record.system for record in here)):
            found = chosen(here, system=name(gamma))
            rounds, kept = sums(found), alpha(sums(found))
            measured = ratio(alone, found, decode_ms)
            if gamma and rounds and base and kept is not None and measured is not None:
                yield _point(mode, gamma, kept, sum(each.tokens for each in found), rounds, base, measured)


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the table of all points."""
    rows = []
    for each in points(records):
        share = each.measured.value / each.formula
        rows.append(
            (
                *(each.mode, f"{each.gamma}", f"{each.alpha:.2f}", f"{each.tokens:.2f}"),
                *(f"{expected_tokens(each.alpha, each.gamma):.2f}", f"{each.draft_cost:.3f}", f"{each.wire_cost:.3f}"),
                *(f"{each.pass_cost:.2f}", f"{each.measured.value:.2f}", interval(each.measured)),
                *(f"{each.formula:.2f}", f"{share:.2f}", met(share >= _LEAST_SHARE, f"≥ {_LEAST_SHARE:g}")),
            )
        )
    tokens = ("tokens a round", "formula's")
    costs = ("c", "r", "target pass to gamma 0's")
    headers = ("mode", "gamma", "alpha", *tokens, *costs, "times as fast as gamma 0", "95% interval", "formula")
    return [Table("Speed-up at a fixed gamma", (*headers, "measured / formula", "target"), tuple(rows))]


def _point(mode: str, gamma: int, kept: float, tokens: int, rounds: Rounds, base: Rounds, measured: Interval) -> Point:
    unit_ms = round_ms(base)
    other = [sum(ms for name, ms in each.ms.items() if name not in _PASSES) / each.rounds for each in (rounds, base)]
    return Point(
        mode=mode,
        gamma=gamma,
        alpha=kept,
        tokens=tokens / rounds.rounds,
        draft_cost=rounds.draft_forward_ms / rounds.proposed / unit_ms,
        wire_cost=(other[0] - other[1]) / unit_ms,
        pass_cost=(rounds.ms["target pass"] / rounds.rounds) / (base.ms["target pass"] / base.rounds),
        measured=measured,
    )
