"""Runs the systems one after the other, interleaved, so that a slow minute of the machine falls on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import psutil

from bench.costs import RoundCost, round_costs
from bench.systems import Job, Outcome, System

MODES: Mapping[str, float] = {"greedy": 0.0, "temperature 1": 1.0}
_WARM_UP_TOKENS = 8


class UnfairRunError(click.ClickException):
    """The systems did not do the same work; the message says how."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as all systems are given it."""

    question_id: int
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one system.

    Attributes:
        mode: Key of MODES.
        system: Its name.
        repeat: From 0.
        question: What was asked.
        wall_ms: By the client's clock.
        first_token_ms: The same; None where it is not told.
        tokens: Ids of the answer.
        drafts_tested: How many drafts the rule looked at.
        drafts_accepted: How many it kept.
        costs: Of each round.
        idle_cpu_ms: CPU time that the other processes used meanwhile; None for the service, whose processes they are.
    """

    mode: str
    system: str
    repeat: int
    question: Question
    wall_ms: float
    first_token_ms: float | None
    tokens: tuple[int, ...]
    drafts_tested: int
    drafts_accepted: int
    costs: tuple[RoundCost, ...]
    idle_cpu_ms: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be run next."""

    mode: str
    system: System
    repeat: int
    question: Question


def plan(systems: Sequence[System], questions: Sequence[Question], repeats: int) -> Iterator[Step]:
    """Yield every run in order: for each repeat, prompt and mode all systems, the first of them in turn."""
    turn = 0
    for repeat in range(repeats):
        for question in questions:
            for mode in MODES:
                for i in range(len(systems)):
                    yield Step(mode, systems[(turn + i) % len(systems)], repeat, question)
                turn += 1


async def warm_up(systems: Sequence[System], question: Question) -> None:
    """Run every system once in every mode."""
    for system in systems:
        for temperature in MODES.values():
            await system.write(Job(question.ids, temperature, _WARM_UP_TOKENS, seed=0))


async def measure(
    systems: Sequence[System],
    questions: Sequence[Question],
    *,
    repeats: int,
    tokens: int,
    weights_hash: str,
    on_step: Callable[[Step], None],
) -> list[Run]:
    """Run everything, one thing at a time.

    Args:
        systems: What to compare.
        questions: What to ask.
        repeats: How often.
        tokens: Of every answer.
        weights_hash: Of the model that all systems have to use.
        on_step: Told of every run before it starts.

    Raises:
        UnfairRunError: A system wrote another number of tokens, or uses other weights.
    """
    runs = []
    for step in plan(systems, questions, repeats):
        on_step(step)
        job = Job(step.question.ids, MODES[step.mode], tokens, seed=1000 * step.repeat + step.question.question_id)
        before_s = _children_cpu_s()
        outcome = await step.system.write(job)
        others_ms = (_children_cpu_s() - before_s) * 1e3
        if len(outcome.tokens) != tokens:
            raise UnfairRunError(f"{step.system.name} wrote {len(outcome.tokens)} tokens, not {tokens}")
        if outcome.weights_hash != weights_hash:
            raise UnfairRunError(
                f"{step.system.name} uses weights {outcome.weights_hash[:12]}, not {weights_hash[:12]}"
            )
        runs.append(_run(step, outcome, others_ms))
    return runs


def _run(step: Step, outcome: Outcome, others_ms: float) -> Run:
    return Run(
        mode=step.mode,
        system=step.system.name,
        repeat=step.repeat,
        question=step.question,
        wall_ms=outcome.wall_s * 1e3,
        first_token_ms=None if outcome.first_token_s is None else outcome.first_token_s * 1e3,
        tokens=outcome.tokens,
        drafts_tested=sum(each.tested for each in outcome.rounds),
        drafts_accepted=sum(each.accepted for each in outcome.rounds),
        costs=tuple(round_costs(outcome.rounds)),
        idle_cpu_ms=None if outcome.rounds else others_ms,
    )


def _children_cpu_s() -> float:
    """Return the CPU time that this process's children, the services, have used so far."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return float(sum(each.user + each.system for each in times))
