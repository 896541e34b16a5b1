"""Gamma chosen by what pays, in simulated rounds; see `rounds_simulated` for what is assumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.common.specdec.types import Decision, Origin
from services.coordinator.costs import CostLine, RoundCosts
from services.coordinator.gamma import AdaptiveGamma, Speculation
from services.coordinator.keeping import KeepRates, SessionShift
from services.coordinator.types import Call, Round
from tests.coordinator.rounds_simulated import Simulation, World

PASS_S = 0.02
# The constants of what is tested were chosen on other seeds, from 100 on.
SEEDS = range(4)


def world(alpha: float, c: float) -> World:
    """Return a world with an alpha and a cost of a draft in passes of the target, which all take the same."""
    return World(keep=lambda _: alpha, draft_s=c * PASS_S, asking_s=0.0005, pass_s=lambda _, __: PASS_S)


def mean_share(true: World, rounds: int = 800) -> float:
    shares = []
    for seed in SEEDS:
        simulation = Simulation(true, seed=seed)
        shares.append(simulation.share_of_best(simulation.run(rounds)))
    return float(np.mean(shares))


@pytest.mark.parametrize("c", [0.02, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.7, 0.8, 0.95])
def test_within_three_per_cent_of_the_best_fixed_gamma(alpha: float, c: float) -> None:
    """All rounds count: the first, in which nothing is known, and those that were run to learn."""
    assert mean_share(world(alpha, c)) > 0.97


def test_with_an_alpha_that_declines() -> None:
    assert mean_share(replace(world(0.9, 0.1), keep=lambda i: 0.9 * 0.85**i)) > 0.97


def test_with_a_pass_that_costs_more_for_each_position() -> None:
    assert mean_share(replace(world(0.7, 0.1), pass_s=lambda _, positions: PASS_S * (1 + 0.05 * positions))) > 0.97


def test_with_a_pass_over_one_position_that_is_cheaper_than_the_line() -> None:
    def pass_s(_: int, positions: int) -> float:
        return PASS_S * (1 if positions == 1 else 1.2 + 0.03 * positions)

    assert mean_share(replace(world(0.7, 0.1), pass_s=pass_s)) > 0.97


@pytest.mark.parametrize(("alpha", "c", "least"), [(0.7, 0.1, 1.05), (0.5, 0.1, 1.02), (0.35, 0.1, 0.97)])
def test_drafts_that_know_when_to_stop_beat_any_fixed_gamma(alpha: float, c: float, least: float) -> None:
    true = replace(world(alpha, c), certainty=1.0, pass_s=lambda _, positions: PASS_S * (1 + 0.05 * positions))
    paces = []
    for seed in SEEDS:
        simulation = Simulation(true, seed=seed)
        simulation.run(600)
        paces.append(simulation.tokens / simulation.seconds)
    assert np.mean(paces) > least * true.best(16)


def test_one_more_draft_has_to_be_worth_its_time() -> None:
    """At 8 tokens for 0.2 s, a draft of .005 s and a position of .01 s have to be kept with .6."""
    policy = AdaptiveGamma(Speculation(8))
    assert policy.stop_below == 0
    for gamma in [1, 2, 4, 8] * 100:
        call = Call(elapsed_s=0.08 + 0.01 * gamma, batch_size=1, pass_tokens=gamma + 1)
        policy.observe(done(gamma, gamma, target=call, total_s=0.08 + 0.015 * gamma))
    policy.choose(7)
    assert policy.stop_below == pytest.approx(8 / (0.08 + 7 * 0.015) * 0.015, rel=0.05)


def test_with_a_drafter_that_mostly_has_no_guess() -> None:
    """Asking costs next to nothing, a guess is long: gamma stays high although one round in four has drafts."""
    true = replace(world(0.8, 0.0), comes=0.25)
    assert mean_share(true) > 0.97


def test_drafts_that_do_not_pay_are_hardly_tried() -> None:
    simulation = Simulation(world(0.1, 0.5))
    chosen = simulation.run(600)
    drafted = [gamma for (gamma,) in chosen[100:] if gamma]
    # Tried again all the same: that is how a change is noticed.
    assert 2 <= len(drafted) < 0.1 * len(chosen)
    assert simulation.share_of_best(chosen[100:]) > 0.97


def test_a_draft_that_is_always_late_is_left_alone() -> None:
    true = replace(world(0.9, 0.1), asking_s=2.0, late_s=1.0)
    simulation = Simulation(true)
    simulation.run(50)
    chosen = simulation.run(500)
    waited_s = sum(1.0 for (gamma,) in chosen if gamma)
    assert waited_s < 0.25 * 500 * PASS_S
    simulation.world = world(0.9, 0.1)
    assert any(gamma for (gamma,) in simulation.run(4000))


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_an_alpha_that_changes_is_followed_within_20_rounds(before: float, after: float) -> None:
    shares = []
    for seed in range(8):
        simulation = Simulation(world(before, 0.1), seed=seed, most=8)
        simulation.run(300)
        simulation.world = world(after, 0.1)
        simulation.run(20)
        gamma = int(np.median(simulation.run(10)))
        shares.append(simulation.world.pace(gamma) / simulation.world.best(8))
    assert np.mean(shares) > 0.97


def test_where_positions_cost_all_sessions_gamma_falls() -> None:
    """Alone a pass has positions to spare; eight sessions fill it, and each position then delays all of them."""
    true = replace(world(0.8, 0.1), pass_s=lambda _, positions: PASS_S * (1 + 0.1 * max(0, positions - 8)))
    simulation = Simulation(true, sessions=8)
    simulation.sessions = 1
    simulation.run(200)
    alone = np.mean(simulation.run(40))
    simulation.sessions = 8
    simulation.run(60)
    together = np.mean(simulation.run(40))
    simulation.sessions = 1
    simulation.run(20)
    again = np.mean(simulation.run(40))
    assert together < 0.6 * alone
    assert again > 1.5 * together


def test_a_load_that_changes_is_followed_within_20_rounds() -> None:
    """Sessions in step, where all wait for the drafts of any: what one does for itself costs the others."""
    true = replace(world(0.8, 0.1), pass_s=lambda _, positions: PASS_S * (1 + 0.03 * max(0, positions - 8)))
    shares, errors = [], []
    for seed in SEEDS:
        simulation = Simulation(true, sessions=8, seed=seed)
        simulation.sessions = 1
        simulation.run(150)
        simulation.sessions = 8
        simulation.run(20)
        alone_s = simulation.speculation.costs.price().alone_s
        errors.append(alone_s / (true.pass_s(8, 8) + true.own_s) - 1)
        shares.append(simulation.share_of_best(simulation.run(40)))
    assert np.mean(shares) > 0.9
    assert np.max(np.abs(errors)) < 0.25, "what it takes without drafts is known, though only drafts were timed before"


def done(gamma: int, accepted: int, **fields: object) -> Round:
    decision = Decision((0,) * (accepted + 1), accepted, min(accepted + 1, gamma), Origin.RESIDUAL)
    values = {
        "index": 1,
        "gamma": gamma,
        "proposed": gamma,
        "decision": decision,
        "tokens": decision.tokens,
        "finish": None,
        "degraded": "",
        "draft": Call(elapsed_s=0.01 * gamma),
        "target": Call(elapsed_s=0.02, batch_size=1, pass_tokens=gamma + 1),
        "start_s": 0.0,
        "total_s": 0.02 + 0.01 * gamma,
        "accept_s": 0.0,
    }
    return Round(**(values | fields))  # type: ignore[arg-type]


def usual(policy: AdaptiveGamma) -> int:
    """Return what is chosen most of the time: not every round is, some are run to learn."""
    chosen = []
    for _ in range(9):
        chosen.append(policy.choose(100))
        policy.observe(done(chosen[-1], chosen[-1]))
    return int(np.median(chosen))


def test_a_drafter_that_is_absent_is_asked_again_as_before() -> None:
    """To ask costs nothing, and it is by asking that its session is opened when it is back."""
    policy = AdaptiveGamma(Speculation(8))
    for _ in range(50):
        policy.observe(done(4, 4))
    before = usual(policy)
    for _ in range(500):
        policy.observe(
            done(4, 0, proposed=0, degraded="draft lost", draft=Call(), total_s=0.02, target=Call(elapsed_s=0.02))
        )
    assert before > 0
    assert abs(usual(policy) - before) <= 2


def test_gamma_fits_in_the_room() -> None:
    policy = AdaptiveGamma(Speculation(8))
    assert [policy.choose(room) for room in (-1, 0, 2)] == [0, 0, 2]
    for _ in range(50):
        policy.observe(done(8, 8))
    assert usual(policy) > 5
    assert policy.choose(3) <= 3


def test_an_untested_draft_teaches_nothing() -> None:
    """Two rounds that differ in drafts behind a rejection only leave the same estimates."""
    rates = KeepRates(8), KeepRates(8)
    for each, gamma in zip(rates, (2, 8), strict=True):
        each.observe(gamma, gamma, 1)
    assert list(rates[0].kept[:2]) == list(rates[1].kept[:2])
    # Behind the rejection nothing was seen: the rate of the offset before it, in both.
    assert rates[0].kept[7] == rates[1].kept[7] == pytest.approx(rates[0].kept[1])


def test_a_text_whose_drafts_are_easier_than_usual() -> None:
    rates = KeepRates(4)
    for _ in range(400):
        rates.observe(1, 1, 0)
        rates.observe(1, 1, 1)
    shift = SessionShift(rates)
    assert shift.rates()[0] == pytest.approx(0.5, abs=0.02)
    for _ in range(30):
        shift.observe(1, 1)
    assert shift.rates()[0] > 0.9


def test_a_request_whose_drafts_change_takes_its_own_part_of_what_others_expect_along() -> None:
    def first_rate(others: int) -> float:
        rates = KeepRates(4)
        shift = SessionShift(rates)
        for i in range(100):
            rates.observe(1, 1, 0)
            shift.observe(1, 0)
            for _ in range(others):
                rates.observe(1, 1, i % 4 == 0)
        for _ in range(10):
            rates.observe(1, 1, 1)
            shift.observe(1, 1)
        return rates.kept[0]

    assert first_rate(others=0) > 0.4
    # The others are as they were.
    assert first_rate(others=9) == pytest.approx(0.25, abs=0.06)


def test_costs_of_each_load_are_its_own() -> None:
    costs = RoundCosts()
    for sessions, slope_s in ((1, 0.0), (8, 0.01)):
        for gamma in [0, 1, 2, 4, 8] * 20:
            call = Call(elapsed_s=0.02 + slope_s * gamma, batch_size=sessions, pass_tokens=sessions * (gamma + 1))
            for _ in range(sessions):
                costs.observe(done(gamma, 0, target=call, total_s=0.021 + (slope_s + 0.002) * gamma), asked=gamma > 0)
    assert costs.price() == pytest.approx((0.021, 0.021, 0.0, 0.012), rel=0.02, abs=4e-4)
    for _ in range(12):
        costs.observe(done(2, 0, target=Call(elapsed_s=0.02, batch_size=1, pass_tokens=3), total_s=0.025), asked=True)
    assert costs.price() == pytest.approx((0.021, 0.021, 0.0, 0.002), rel=0.02, abs=4e-4)


def test_a_line_and_what_is_not_on_it() -> None:
    line = CostLine(0.0)
    for n in [0, 1, 3, 6] * 60:
        line.observe(n, 0.010 if n == 0 else 0.02 + 0.001 * n)
    assert [line.seconds(n) for n in (0, 1, 6)] == pytest.approx([0.010, 0.021, 0.026], rel=0.06)


def test_one_long_pause_is_no_price() -> None:
    curve = CostLine(0.0)
    for _ in range(20):
        curve.observe(4, 0.02)
    curve.observe(4, 0.5)
    assert curve.seconds(4) == pytest.approx(0.02, rel=0.01)
    for _ in range(10):
        curve.observe(4, 0.5)
    assert curve.seconds(4) > 0.2
    # Over at last: what was known before holds again.
    curve.observe(4, 0.02)
    assert curve.seconds(4) == pytest.approx(0.02, rel=0.01)


def test_two_accidents_in_a_row_are_no_price_either() -> None:
    line = CostLine(None)
    for n in [2, 5] * 20:
        line.observe(n, 0.001 + 0.004 * n)
    for seconds in (0.11, 0.11, 0.021, 0.021):
        line.observe(5, seconds)
    assert [line.seconds(n) for n in (1, 5, 16)] == pytest.approx([0.005, 0.021, 0.065], rel=0.03)
