"""How often drafts are kept, learned from those that were tested."""

from __future__ import annotations

import pytest

from services.coordinator.keeping import KeepRates, SessionKeeping


def after_rounds(keeping: SessionKeeping, gamma: int, accepted: int, rounds: int) -> None:
    for _ in range(rounds):
        keeping.observe(gamma, gamma, accepted)


def first_rate(keeping: SessionKeeping) -> float:
    return float(keeping.reach[1])


def test_an_untested_draft_teaches_nothing() -> None:
    """Rounds that differ in drafts behind a rejection only leave the same estimates."""
    each = [SessionKeeping(KeepRates(8)) for _ in range(2)]
    for keeping, gamma in zip(each, (2, 8), strict=True):
        after_rounds(keeping, gamma, accepted=1, rounds=40)
    assert list(each[0].reach) == pytest.approx(list(each[1].reach), rel=1e-12)


def test_a_round_that_asked_for_fewer_says_nothing_of_what_it_did_not_ask_for() -> None:
    """Two of four are kept, then two of two: how much harder the third is than the first is known as before."""

    def third() -> float:
        return float(rates.survival[16, 3] / rates.survival[16, 2])

    rates = KeepRates(4)
    keeping = SessionKeeping(rates)
    after_rounds(keeping, 4, accepted=2, rounds=64)
    before = third()
    assert before < 0.2
    after_rounds(keeping, 2, accepted=2, rounds=64)
    assert third() < before + 0.05


def test_a_text_whose_drafts_are_easier_than_usual() -> None:
    rates = KeepRates(4)
    others = SessionKeeping(rates)
    for _ in range(400):
        after_rounds(others, 1, 0, rounds=1)
        after_rounds(others, 1, 1, rounds=1)
    keeping = SessionKeeping(rates)
    assert first_rate(keeping) == pytest.approx(0.5, abs=0.05)
    after_rounds(keeping, 1, accepted=1, rounds=30)
    assert first_rate(keeping) > 0.9
    assert first_rate(SessionKeeping(rates)) == pytest.approx(0.5, abs=0.1)


def test_what_was_believed_for_long_is_dropped_where_a_few_rounds_contradict_it() -> None:
    keeping = SessionKeeping(KeepRates(4))
    after_rounds(keeping, 4, accepted=0, rounds=500)
    assert first_rate(keeping) < 0.02
    after_rounds(keeping, 4, accepted=4, rounds=4)
    assert first_rate(keeping) > 0.85
