"""What rounds cost, learned from what they took."""

from __future__ import annotations

import pytest

from services.coordinator.costs import CostCurve, RoundCosts
from services.coordinator.types import Call, Round
from tests.coordinator.rounds_simulated import done


def test_costs_of_each_load_are_its_own() -> None:
    costs = RoundCosts(8)

    def run(one: Round) -> None:
        costs.follow(one)
        costs.observe(one, asked=one.gamma > 0)

    for sessions, slope_s in ((1, 0.0), (8, 0.01)):
        for gamma in [0, 1, 2, 4, 8] * 20:
            call = Call(elapsed_s=0.02 + slope_s * gamma, batch_size=sessions, pass_tokens=sessions * (gamma + 1))
            for _ in range(sessions):
                run(done(gamma, 0, target=call, total_s=0.021 + (slope_s + 0.002) * gamma))
    assert costs.price()[:3] == pytest.approx((0.021, 0.021, 0.012), rel=0.03, abs=4e-4)
    for _ in range(12):
        run(done(2, 0, target=Call(elapsed_s=0.02, batch_size=1, pass_tokens=3), total_s=0.025))
    assert costs.price()[:3] == pytest.approx((0.021, 0.021, 0.002), rel=0.03, abs=4e-4)


def test_a_line_and_what_is_not_on_it() -> None:
    curve = CostCurve(9)
    for n in [0, 1, 3, 6] * 60:
        curve.observe(n, 0.010 if n == 0 else 0.02 + 0.001 * n)
    assert curve.seconds[[0, 1, 6]] == pytest.approx([0.010, 0.021, 0.026], rel=0.06)


def test_positions_that_are_free_up_to_a_point() -> None:
    curve = CostCurve(9, slope=0.0)
    for n in [0, 1, 2, 3, 4, 8] * 40:
        curve.observe(n, 0.02 + 0.01 * max(0, n - 2))
    assert curve.seconds[[0, 2, 3, 4, 8]] == pytest.approx([0.02, 0.02, 0.03, 0.04, 0.08], rel=0.1)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_few_long_pauses_are_no_price_and_a_change_is(factor: float) -> None:
    def expected(n: int) -> float:
        return 0.001 + 0.004 * n

    curve = CostCurve(9)
    for n in [2, 5] * 20:
        curve.observe(n, expected(n))
    for _ in range(2):
        curve.observe(5, 5 * expected(5))
    curve.observe(5, expected(5))
    assert curve.seconds[[1, 5, 8]] == pytest.approx([expected(1), expected(5), expected(8)], rel=0.3)
    for _ in range(8):
        curve.observe(5, factor * expected(5))
    # Nor is this only known of what was measured since.
    assert curve.seconds[[2, 5, 8]] == pytest.approx([factor * expected(n) for n in (2, 5, 8)], rel=0.15)
