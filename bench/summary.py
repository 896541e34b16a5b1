"""From runs to figures: speeds, ratios, and the service's own cost, each by mode and system."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.costs import RoundCost
from bench.measure import MODES, Run
from bench.statistics import Interval, paired_ratio

DEFAULT_DRAFT, TARGET_ALONE, TRANSFORMERS = "paceline", "paceline, gamma 0", "transformers"
RATIOS = ((TARGET_ALONE, TRANSFORMERS), (DEFAULT_DRAFT, TRANSFORMERS), (DEFAULT_DRAFT, TARGET_ALONE))


@dataclass(frozen=True, slots=True)
class Speed:
    """One system in one mode; medians over its runs.

    Attributes:
        mode: Key of MODES.
        system: Its name.
        tokens_per_s: Of an answer, its prompt's pass included.
        first_token_ms: None where it is not told.
        tokens_per_round: Mean; None where there are no rounds.
        alpha: Drafts kept / drafts tested; None where none were.
        equal_answers: Fraction of answers that are transformers' own, token for token; None at temperature 1 and for
            transformers itself.
        idle_cpu_ms: Of the other processes meanwhile, a second; None where they are not idle.
    """

    mode: str
    system: str
    tokens_per_s: float
    first_token_ms: float | None
    tokens_per_round: float | None
    alpha: float | None
    equal_answers: float | None
    idle_cpu_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much faster `system` is than `than`: 2 is half the time."""

    mode: str
    system: str
    than: str
    times: Interval


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds a round of one system in one mode, over the rounds of all its runs.

    Attributes:
        mode: Key of MODES.
        system: Its name.
        kind: Which of its rounds.
        rounds: How many there were.
        median: Of each part by itself, so the parts do not quite add up.
        own_p90: Of `own`.
    """

    mode: str
    system: str
    kind: str
    rounds: int
    median: RoundCost
    own_p90: float


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a benchmark."""

    speeds: tuple[Speed, ...]
    ratios: tuple[Ratio, ...]
    costs: tuple[Cost, ...]


def summarize(runs: Sequence[Run]) -> Summary:
    """Return the figures."""
    cells = [(mode, system) for mode in MODES for system in (DEFAULT_DRAFT, TARGET_ALONE, TRANSFORMERS)]
    of = {cell: [run for run in runs if (run.mode, run.system) == cell] for cell in cells}
    return Summary(
        speeds=tuple(_speed(of[cell], of[cell[0], TRANSFORMERS]) for cell in cells),
        ratios=tuple(
            Ratio(mode, system, than, paired_ratio(_walls(of[mode, than]), _walls(of[mode, system])))
            for mode in MODES
            for system, than in RATIOS
        ),
        costs=tuple(cost for cell in cells if cell[1] != TRANSFORMERS for cost in _costs(of[cell])),
    )


def _speed(runs: Sequence[Run], reference: Sequence[Run]) -> Speed:
    tested = sum(run.drafts_tested for run in runs)
    rounds = sum(len(run.costs) for run in runs)
    answers = {(run.repeat, run.question.question_id): run.tokens for run in reference}
    equal = [run.tokens == answers[run.repeat, run.question.question_id] for run in runs]
    return Speed(
        mode=runs[0].mode,
        system=runs[0].system,
        tokens_per_s=float(np.median([len(run.tokens) / run.wall_ms * 1e3 for run in runs])),
        first_token_ms=_median(runs, lambda run: run.first_token_ms),
        tokens_per_round=sum(len(run.tokens) for run in runs) / rounds if rounds else None,
        alpha=sum(run.drafts_accepted for run in runs) / tested if tested else None,
        equal_answers=float(np.mean(equal)) if MODES[runs[0].mode] == 0 and runs is not reference else None,
        idle_cpu_ms=_median(runs, lambda run: None if run.idle_cpu_ms is None else run.idle_cpu_ms / run.wall_ms * 1e3),
    )


def _costs(runs: Sequence[Run]) -> Iterator[Cost]:
    every = [cost for run in runs for cost in run.costs]
    drafted = [cost for cost in every if cost.drafts]
    for kind, costs in (("all", every), ("with drafts", drafted)):
        if costs:
            values = {name: [getattr(cost, name) for cost in costs] for name in RoundCost.__slots__}
            median = RoundCost(**{name: float(np.median(values[name])) for name in values})
            p90 = float(np.quantile(values["own"], 0.9))
            yield Cost(runs[0].mode, runs[0].system, kind, len(costs), median, p90)


def _walls(runs: Sequence[Run]) -> npt.NDArray[np.float64]:
    """Return the wall times of one cell, float64[prompts, repeats]."""
    ordered = sorted(runs, key=lambda run: (run.question.question_id, run.repeat))
    prompts = len({run.question.question_id for run in runs})
    return np.array([run.wall_ms for run in ordered]).reshape(prompts, -1)


def _median(runs: Sequence[Run], value: Callable[[Run], float | None]) -> float | None:
    known = [each for run in runs if (each := value(run)) is not None]
    return float(np.median(known)) if known else None
