"""Passes wait for sessions that are about to come back, where that takes less than a pass of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.gathering import Gathering, PassShape
from services.common.engine.runner import Feed, ModelRunner
from tests.support.engines import StartEngine, evaluate, held, runner_of

# Passes of 100 ms and 1 ms a position.
SHAPE = PassShape(once_s=0.1, position_s=0.001)


def known(**away_s: float) -> Gathering:
    """Return what knows since time 0 of sessions that have left, and of how long each was away so far."""
    gathering = Gathering(SHAPE)
    for session, seconds in away_s.items():
        for lap in range(20):
            gathering.left(session, lap * 10 - 200)
            gathering.came(session, lap * 10 - 200 + seconds)
        gathering.left(session, 0.0)
    return gathering


def test_a_pass_waits_for_the_last_of_those_that_come_back_within_what_a_pass_costs_once() -> None:
    gathering = known(soon=0.010, later=0.050, late=0.120)
    assert gathering.wait_s(0.001, 1) == pytest.approx(0.049, abs=0.002)
    gathering.came("later", 0.003)
    assert gathering.wait_s(0.003, 1) == pytest.approx(0.007, abs=0.002)
    gathering.came("soon", 0.008)
    assert gathering.wait_s(0.008, 1) == 0.0


def test_a_wait_ends_when_it_has_taken_what_a_pass_costs_once_whoever_else_leaves() -> None:
    gathering = known(soon=0.060)
    assert gathering.wait_s(0.0, 1) > 0
    gathering.left("soon", 0.050)
    assert gathering.wait_s(0.050, 1) == 0.0, "due at .110, past .1"
    gathering.passed(1, 0.101)
    assert gathering.wait_s(0.050, 1) == pytest.approx(0.060, abs=0.002), "the next pass waits anew"


def test_one_that_is_far_away_is_never_waited_for() -> None:
    """Nor at the time at which it would come if it had been away for no longer than is remembered."""
    gathering = known(far=1.0)
    for i in range(100):
        assert gathering.wait_s(i / 100, 1) == 0.0
        gathering.passed(1, 0.101)


def test_many_do_not_wait_long_for_few() -> None:
    gathering = known(a=0.010, b=0.010, far=0.080)
    assert gathering.wait_s(0.0, 1) == pytest.approx(0.080, abs=0.002)
    assert gathering.wait_s(0.0, 3) == pytest.approx(0.080, abs=0.002)
    assert gathering.wait_s(0.0, 5) == pytest.approx(0.010, abs=0.002)
    assert gathering.wait_s(0.0, 25) == 0.0


def test_one_that_is_late_is_not_waited_for_any_more() -> None:
    gathering = known(soon=0.010)
    assert gathering.wait_s(0.005, 1) > 0
    assert gathering.wait_s(0.015, 1) == 0.0


def test_nobody_waits_for_a_session_that_is_new_or_has_ended() -> None:
    gathering = known(soon=0.010)
    gathering.ended("soon")
    gathering.left("new", 0.0)
    assert gathering.wait_s(0.0, 1) == 0.0


def test_one_whose_times_differ_is_waited_for_longer() -> None:
    steady, unsteady = Gathering(SHAPE), Gathering(SHAPE)
    for lap in range(40):
        for gathering, seconds in ((steady, 0.020), (unsteady, 0.010 if lap % 2 else 0.030)):
            gathering.left("one", lap)
            gathering.came("one", lap + seconds)
    for gathering in (steady, unsteady):
        gathering.left("one", 100.0)
    assert unsteady.wait_s(100.0, 1) > steady.wait_s(100.0, 1) + 0.010


def test_a_pause_is_forgotten_after_some_rounds() -> None:
    gathering = known(soon=0.010)
    gathering.came("soon", 60.0)
    for lap in range(20):
        gathering.left("soon", 100.0 + lap)
        if gathering.wait_s(100.0 + lap, 1):
            break
        gathering.came("soon", 100.010 + lap)
        gathering.passed(1, 0.101)
    assert 1 < lap < 15


def test_what_a_pass_costs_once_is_the_part_that_its_positions_do_not_explain() -> None:
    gathering = known(soon=0.090)
    for _ in range(50):
        # Compute-bound: 400 positions in 500 ms, of which 100 are spent once.
        gathering.passed(400, 0.5)
    assert gathering.wait_s(0.0, 1) > 0
    for _ in range(50):
        gathering.passed(400, 0.25)
    assert gathering.wait_s(0.0, 1) == 0.0, "twice as fast: 50 ms are spent once now"


class Slow:
    """An engine whose passes take a while; how many sessions shared each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        run, runner = ModelRunner.run, runner_of(engine)

        def run_slowly(feeds: Sequence[Feed]) -> list[torch.Tensor]:
            self.sizes.append(len(feeds))
            time.sleep(0.2)
            return run(runner, feeds)

        monkeypatch.setattr(runner, "run", run_slowly)


async def turns(engine: Engine, slow: Slow, laps: int) -> None:
    """Have two sessions ask, and two others while those are served: they would take turns for ever."""

    async def ask(first: int) -> None:
        session = await engine.open(laps)
        while len(slow.sizes) < first:
            await asyncio.sleep(0.01)
        for at in range(laps):
            await evaluate(session, at, [at + 1])
            # What lies between two requests: the wire, the rule, drafts.
            await asyncio.sleep(0.02)
        session.close()

    await asyncio.gather(*(ask(first) for first in (0, 0, 1, 1)))


async def test_two_groups_that_take_turns_become_one(
    llama_folder: object, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(llama_folder)
    slow = Slow(engine, monkeypatch)
    await turns(engine, slow, laps=20)
    assert sum(slow.sizes) == 80
    assert slow.sizes.count(4) >= 8, slow.sizes


async def test_without_gathering_every_pass_begins_at_once(
    llama_folder: object, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(llama_folder, gather=False)
    slow = Slow(engine, monkeypatch)
    await turns(engine, slow, laps=6)
    assert slow.sizes.count(4) <= 1, slow.sizes


async def test_a_session_that_is_closed_during_its_pass_is_not_remembered(
    llama_folder: object, start_engine: StartEngine
) -> None:
    engine = await start_engine(llama_folder)
    for _ in range(3):
        session = await engine.open(2)
        hold, holding = await held(session)
        session.close()
        hold.release()
        await holding
    assert not engine._gathering._returns
