"""Whether drafting runs ahead: found by the clock, followed when it changes, and rarely asked."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from services.coordinator.overlap import FixedOverlap, MeasuredOverlap, OverlapPolicy, overlap_policy

Cost = Callable[[bool], float]


def run(policy: OverlapPolicy, cost: Cost, cycles: int, rng: random.Random) -> float:
    """Run cycles with 20% of noise and a stall now and then; return the share that ran ahead."""
    ahead = 0
    for _ in range(cycles):
        cycle = policy.begin()
        ahead += cycle.runs_ahead
        stall = 20.0 if rng.random() < 0.003 else 1.0
        policy.end(cycle, cost(cycle.runs_ahead) * rng.uniform(0.8, 1.2) * stall)
    return ahead / cycles


def pays(ahead: bool) -> float:
    return 0.035 if ahead else 0.040


def costs(ahead: bool) -> float:
    return 0.050 if ahead else 0.040


@pytest.mark.parametrize("seed", range(5))
def test_what_takes_less_time_is_done_nearly_always(seed: int) -> None:
    assert run(MeasuredOverlap(), pays, 4000, random.Random(seed)) > 0.9
    assert run(MeasuredOverlap(), costs, 4000, random.Random(seed)) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_what_costs_is_tried_ever_more_rarely(seed: int) -> None:
    policy, rng = MeasuredOverlap(), random.Random(seed)
    run(policy, costs, 4000, rng)
    assert 0 < run(policy, costs, 8000, rng) < 0.04


@pytest.mark.parametrize("seed", range(5))
def test_what_clearly_costs_is_given_up_within_a_trial(seed: int) -> None:
    """The first 200 cycles, most of a short answer's: 48 of them would be a trial to its end."""
    assert 8 <= run(MeasuredOverlap(), costs, 200, random.Random(seed)) * 200 <= 36


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_followed(seed: int) -> None:
    policy, rng = MeasuredOverlap(), random.Random(seed)
    for cost in (costs, pays, costs):
        run(policy, cost, 4000, rng)
        share = run(policy, cost, 4000, rng)
        assert share > 0.9 if cost is pays else share < 0.1


def test_a_cycle_that_lies_across_a_switch_tells_nothing() -> None:
    """With many requests at once: those that began before a switch end after it, and took what both ways take."""
    policy, rng = MeasuredOverlap(), random.Random(1)
    running = [policy.begin() for _ in range(16)]
    ahead = 0
    for i in range(6000):
        is_ahead = sum(cycle.runs_ahead for cycle in running)
        cycle, running[i % 16] = running[i % 16], policy.begin()
        ahead += cycle.runs_ahead
        # What one request drafts ahead costs the others: its own cycle is shorter all the same.
        policy.end(cycle, (0.040 - 0.004 * cycle.runs_ahead + 0.001 * is_ahead) * rng.uniform(0.9, 1.1))
    assert ahead / 6000 < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_it_is_known_for_each_load(seed: int) -> None:
    """Eight requests in step, whose cycles meet with the same accidents: there it costs what pays one alone."""
    running = 1
    policy, rng = MeasuredOverlap(lambda: running), random.Random(seed)

    def share(rounds: int) -> float:
        ahead = 0
        for _ in range(rounds):
            noise = rng.lognormvariate(0, 0.2)
            for _ in range(running):
                cycle = policy.begin()
                ahead += cycle.runs_ahead
                policy.end(cycle, (pays if running == 1 else costs)(cycle.runs_ahead) * noise)
        return ahead / rounds / running

    share(3000)
    running = 8
    share(500)
    assert share(1000) < 0.1
    running = 1
    assert share(1000) > 0.9


def test_fixed() -> None:
    for mode, ahead in (("on", True), ("off", False)):
        policy = overlap_policy(mode)  # type: ignore[arg-type]
        assert isinstance(policy, FixedOverlap)
        assert run(policy, costs, 100, random.Random(1)) == ahead
    assert isinstance(overlap_policy("auto"), MeasuredOverlap)
