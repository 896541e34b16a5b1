"""The overlap benchmark's figures: which rounds count, and what the formula says."""

from __future__ import annotations

import pytest

from bench.overlap import Measured, Setup, predicted, summary, table
from paceline.v1 import coordinator_pb2 as pb

SETUP = Setup(shares=(0.2,), alphas=(0.7,), gamma=4, pass_ms=50.0, tokens=16, repeats=1)


def row(total_ms: float, accepted: int, ran_ahead: bool, proposed: int = 4) -> pb.RoundStats:
    tested = min(proposed, accepted + 1)
    emitted = accepted + (accepted <= 4)
    return pb.RoundStats(
        gamma=4,
        proposed=proposed,
        tested=tested,
        accepted=accepted,
        emitted=emitted,
        total_ms=total_ms,
        ran_ahead=ran_ahead,
    )


def result(*rows: pb.RoundStats) -> pb.GenerateResult:
    return pb.GenerateResult(speculation=pb.SpeculationStats(per_round=rows))


def test_kept_rounds_that_ran_ahead_are_those_that_had_their_drafts() -> None:
    ahead = summary(
        0.2, "on", [result(row(900, 5, True, 5), row(55, 5, True, 5), row(60, 2, True), row(95, 5, True, 5))]
    )
    # The first takes the prompt in, the third rejects, the last begins without drafts.
    assert ahead.kept_ms == (55,)
    assert ahead.ms_per_token == pytest.approx(((55 + 60 + 95) / 13,))
    assert ahead.ran_ahead == 1
    in_turn = summary(0.2, "off", [result(row(900, 4, False), row(95, 4, False), row(95, 1, False))])
    assert in_turn.kept_ms == (95,)
    assert in_turn.alpha == pytest.approx(9 / 10)


def test_the_formula() -> None:
    assert predicted(SETUP, 0.2, 1.0) == pytest.approx(90 / 50)
    assert predicted(SETUP, 0.3, 1.0) == pytest.approx(110 / 75)
    # Nothing is kept: half a step is lost.
    assert predicted(SETUP, 0.2, 0.0) == pytest.approx(90 / 95)


def test_the_table_compares_what_was_measured_together() -> None:
    kinds = [
        Measured(0.2, mode, 1.0, (ms, ms), (5 * ms,), 0.5) for mode, ms in (("off", 20), ("on", 10), ("auto", 12.5))
    ]
    (shown,) = table(SETUP, kinds).rows
    assert shown == ("0.2", "1.00", "90", "100.0", "50", "50.0", "1.80", "2.00", "1.60", "50%")
