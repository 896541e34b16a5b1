"""Runs the systems one after the other, interleaved, so that a slow minute of the machine falls on all of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
import psutil

from bench.record import Place, Record, record
from bench.store import Store
from bench.systems import Job, Outcome, System


@dataclass(frozen=True, slots=True)
class Mode:
    """How tokens are chosen; a temperature of 0 is greedy."""

    temperature: float
    top_p: float = 1.0


MODES: Mapping[str, Mode] = {
    "greedy": Mode(0.0),
    "temperature 0.7, top_p 0.9": Mode(0.7, 0.9),
    "temperature 1": Mode(1.0),
}
_WARM_UP_TOKENS = 16
_DRAFT_WAIT_S = 60.0


class UnfairRunError(click.ClickException):
    """The systems did not do the same work; the message says how."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as all systems are given it."""

    question_id: int
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What every system does once, one after the other: some answers, written at the same time."""

    place: Place
    jobs: tuple[Job, ...]


def blocks(questions: Sequence[Question], modes: Sequence[str], repeats: int, tokens: int) -> Iterator[Block]:
    """Yield one block for each repeat, prompt and mode: one answer at a time."""
    for repeat in range(repeats):
        for question in questions:
            for mode in modes:
                place = Place(mode, repeat, str(question.question_id), question.category)
                yield Block(place, (job(question, mode, tokens, repeat),))


def job(question: Question, mode: str, tokens: int, repeat: int) -> Job:
    """Return an answer to write; repeats have other seeds."""
    how = MODES[mode]
    return Job(question.ids, how.temperature, tokens, seed=1000 * repeat + question.question_id, top_p=how.top_p)


def order(systems: Sequence[System], place: Place) -> list[System]:
    """Return the systems in the order of one block: shuffled, the same for the same block."""
    shuffled = list(systems)
    random.Random(repr(place)).shuffle(shuffled)
    return shuffled


async def warm_up(systems: Sequence[System], question: Question, modes: Sequence[str]) -> dict[str, float]:
    """Run every system in every mode; return the seconds that a token then takes, by system.

    Where a system has drafts, its draft worker may have yet to be found: waits until a round is no longer without it.

    Raises:
        click.ClickException: It is not found.
    """
    seconds = {}
    for system in systems:
        given_up_s = time.monotonic() + _DRAFT_WAIT_S
        while any(each.degraded for each in (await system.write(job(question, modes[0], _WARM_UP_TOKENS, 0))).rounds):
            if time.monotonic() > given_up_s:
                raise click.ClickException(f"{system.name}: its draft worker is not used; see the coordinator's log")
        walls = [(await system.write(job(question, mode, _WARM_UP_TOKENS, 0))).wall_s for mode in modes]
        seconds[system.name] = sum(walls) / len(walls) / _WARM_UP_TOKENS
    return seconds


def left_of(store: Store, planned: Sequence[Block], systems: Sequence[System]) -> list[Block]:
    """Return the blocks that are still to be run: one that was broken off is run again whole."""
    names = {system.name for system in systems}
    return [block for block in planned if not store.has(block.place, names)]


async def measure(
    store: Store,
    systems: Sequence[System],
    left: Sequence[Block],
    *,
    weights_hash: str,
    on_step: Callable[[Place, str], None],
) -> None:
    """Run what is left, one thing at a time, and keep each measurement at once.

    Args:
        store: Keeps them.
        systems: What to compare.
        left: What they are to do.
        weights_hash: Of the model that all systems have to use.
        on_step: Told of every measurement before it starts.

    Raises:
        UnfairRunError: A system wrote another number of tokens, or uses other weights.
    """
    for block in left:
        for system in order(systems, block.place):
            on_step(block.place, system.name)
            store.add(await _measure(system, block, weights_hash))


async def _measure(system: System, block: Block, weights_hash: str) -> Record:
    own_s, others_s = _own_cpu_s(), _children_cpu_s()
    started_s = time.perf_counter()
    outcomes = await asyncio.gather(*(system.write(each) for each in block.jobs))
    wall_s = time.perf_counter() - started_s
    for each, outcome in zip(block.jobs, outcomes, strict=True):
        _refuse_unfair(system.name, each, outcome, weights_hash)
    # Of the processes that had nothing to do: this one has to read what the service streams.
    idle_s = _own_cpu_s() - own_s if outcomes[0].rounds else _children_cpu_s() - others_s
    return record(block.place, system.name, [len(each.prompt) for each in block.jobs], outcomes, wall_s, idle_s)


def _refuse_unfair(name: str, asked: Job, outcome: Outcome, weights_hash: str) -> None:
    if len(outcome.tokens) != asked.tokens:
        raise UnfairRunError(f"{name} wrote {len(outcome.tokens)} tokens, not {asked.tokens}")
    if outcome.weights_hash != weights_hash:
        raise UnfairRunError(f"{name} uses weights {outcome.weights_hash[:12]}, not {weights_hash[:12]}")


def _own_cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def _children_cpu_s() -> float:
    """Return the CPU time that this process's children, the services, have used so far."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return float(sum(each.user + each.system for each in times))
