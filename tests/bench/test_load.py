"""The figures of the coordinator alone: from what was spent to the tables, and from a profile to its parts."""

from __future__ import annotations

import cProfile
from pathlib import Path

import pytest

from bench.load import Spent
from bench.load_profile import Shares, shares
from bench.load_report import Window, tables
from services.common.specdec.acceptance import usable_drafts
from services.common.specdec.types import Draft, Row


def _spent(rounds: int, cpu_s: float = 2.0) -> Spent:
    return Spent(
        wall_s=4.0,
        cpu_s=cpu_s,
        loop_s=cpu_s / 2,
        rounds=rounds,
        tokens=3 * rounds,
        accepted=2 * rounds,
        rejected=rounds // 2,
    )


def _windows(sparse: int, dense: int) -> list[Window]:
    rounds = {("coordinator", "sparse"): sparse, ("coordinator", "dense"): dense}
    return [
        Window(name, rows, 8, _spent(rounds.get((name, rows), 8000) + 100 * repeat))
        for repeat in (0, 1, 2)
        for name in ("coordinator", "relay")
        for rows in ("sparse", "dense")
    ]


def test_spent_in_a_window() -> None:
    assert _spent(500, 5.0).since(_spent(300, 2.0)).rounds == 200
    assert _spent(500, 5.0).since(_spent(300, 2.0)).cpu_s == 3.0


def test_the_table_takes_medians() -> None:
    rounds, _ = tables(_windows(2900, 300), [])
    sparse, dense = rounds.rows
    assert sparse[:8] == ("sparse", "8", "1500", "1450 to 1550", "750", "0.67", "50%", "4050")
    assert sparse[8:10] == ("3.00", "0.80")
    assert (dense[2], dense[-1]) == ("200", "")


@pytest.mark.parametrize(
    ("sparse", "dense", "says"),
    [
        (2900, 300, "(7.5): met"),
        (1700, 100, "(9.0): missed"),  # less than 1,000
        (2900, 600, "(4.3): missed"),
    ],
)
def test_the_target_is_two(sparse: int, dense: int, says: str) -> None:
    assert tables(_windows(sparse, dense), [])[0].rows[0][-1].endswith(says)


def test_a_profile_tells_the_parts(tmp_path: Path) -> None:
    profile = cProfile.Profile()
    drafts = [Draft(3, Row.point_mass(3))] * 5
    with profile:
        for _ in range(50):
            assert usable_drafts(drafts, 8) == (5, "")
    profile.dump_stats(tmp_path / "profile")
    # The calls into numpy are the rule's own.
    assert shares(tmp_path / "profile", "sparse", 50) == Shares("sparse", 50, {"rule": 1.0})


def test_the_table_of_parts() -> None:
    _, parts = tables(_windows(2900, 300), [Shares("sparse", 1, {"rule": 1.0}), Shares("dense", 1, {"gRPC": 1.0})])
    assert parts.rows == (("rule", "100%", "0%"), ("gRPC", "0%", "100%"))
