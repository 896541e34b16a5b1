"""Drafting that runs ahead, by counting: over real gRPC the law is p, and the tokens of a coupled seed are the same."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.v1 import worker_pb2
from services.common.specdec.coupled import winner
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Draft
from services.coordinator import request as planning
from services.coordinator.ahead import Ahead
from services.coordinator.ports import Proposal
from tests.exactness.collect import CONCURRENT, LENGTH, PROMPT, law_for
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import Law
from tests.support.planted import PLAIN
from tests.support.scripts import BadRow, DraftScript, TargetScript, Turn
from tests.support.statistics import SIGNIFICANCE, Answers, power, verdicts

COUPLED = {"verification": worker_pb2.VERIFICATION_COUPLED}
# Time for what runs ahead to arrive, or not: some of it is in time.
SLOW_TARGET = TargetScript(late_s=0.02)


class Unsteady(DraftScript):
    """Sends drafts one by one, and pauses before some of them, by numbers that decide nothing else.

    Under the coupled rule it chooses as the target does, which the law does not need and the share of kept drafts does.
    """

    def __init__(self, coupled: bool = False) -> None:
        super().__init__(one_by_one=True)
        self._coupled = coupled

    def draw(self, turn: Turn, offset: int) -> int:
        if self._coupled:
            return winner(turn.q, turn.seed, len(turn.tokens)).token
        return super().draw(turn, offset)

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        return 0.03 if uniform(turn.seed ^ 1, turn.round, offset, Purpose.ACCEPT) < 0.15 else 0.0


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number the seeds of requests that have none: what may follow the clock is still the same in every run."""
    numbers = itertools.count()
    monkeypatch.setattr(planning.secrets, "randbits", lambda _: next(numbers))


async def replies(cluster: Cluster, gamma: int, requests: int, **fields: Any) -> list[Reply]:
    """Generate answers that may follow the clock: by the plain rule they have no seed."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(number: int) -> Reply:
        seed = {"seed": number if fields else None}
        async with gate:
            return await cluster.generate(PROMPT, gamma=gamma, max_tokens=LENGTH, timeout_s=240, **seed, **fields)

    return await asyncio.gather(*(one(number) for number in range(requests)))


def answers_of(got: Sequence[Reply]) -> Answers:
    return Answers(PROMPT, np.array([each.tokens for each in got]), np.array([each.offsets for each in got]))


def rounds_of(got: Sequence[Reply]) -> list[Any]:
    return [row for each in got for row in each.result.speculation.per_round]


def check(got: Sequence[Reply], law: Law, gamma: int, shift: float) -> None:
    answers, p = answers_of(got), law.p(PLAIN)
    rounds = rounds_of(got)
    went = Counter("kept" if row.accepted > row.gamma else "ahead" if row.ran_ahead else "alone" for row in rounds)
    found = list(verdicts(answers, p))
    print("", dict(went), *found, sep="\n")
    # There were enough of each kind: drafts that ran ahead and were kept, that came too late or were dropped.
    assert min(went["kept"], went["ahead"]) > 0.05 * len(rounds)
    for offset in range(gamma + 1):
        at = answers.by_context(law.vocab_size, answers.offsets == offset)
        assert power(at, p.reshape(-1, law.vocab_size), shift) > 0.99
    assert not [str(verdict) for verdict in found if not verdict.passed]


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize("fields", [{}, COUPLED], ids=["token", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3])
async def test_law(gamma: int, fields: dict[str, Any]) -> None:
    law = law_for(gamma)
    async with scripted_cluster(law, overlap="on", draft=Unsteady(bool(fields)), target=SLOW_TARGET) as cluster:
        got = await replies(cluster, gamma, 80, **fields)
    check(got, law, gamma, shift=0.15)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize("fields", [{}, COUPLED], ids=["token", "coupled"])
@pytest.mark.parametrize(("gamma", "requests"), [(1, 280), (3, 650), (8, 1500)])
async def test_law_at_every_gamma(gamma: int, requests: int, fields: dict[str, Any]) -> None:
    law = law_for(gamma)
    async with scripted_cluster(law, overlap="on", draft=Unsteady(bool(fields)), target=SLOW_TARGET) as cluster:
        got = await replies(cluster, gamma, requests, **fields)
    check(got, law, gamma, shift=0.04)


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_law_with_a_bad_row_of_what_runs_ahead(at: int) -> None:
    """Of y1 it is as if it had not been sent; of a later one it costs the next round its drafts from there on."""

    class SpoilsAhead(DraftScript):
        def q_row(self, turn: Turn, offset: int, token: int) -> Any:
            good = super().q_row(turn, offset, token)
            ran_ahead = uniform(turn.seed ^ 2, turn.round, 0, Purpose.ACCEPT) < 0.5
            return BadRow.NAN.spoil(good, turn.law.vocab_size, token) if ran_ahead and offset == at else good

    law = law_for(3)
    async with scripted_cluster(law, overlap="on", draft=SpoilsAhead(one_by_one=True), target=SLOW_TARGET) as cluster:
        got = await replies(cluster, 3, 40)
    found = list(verdicts(answers_of(got), law.p(PLAIN)))
    print("", *found, sep="\n")
    assert any(row.degraded for row in rounds_of(got))
    assert not [str(verdict) for verdict in found if not verdict.passed]


async def test_coupled_tokens_are_the_same_with_and_without() -> None:
    tokens = []
    for overlap in ("off", "on", "auto"):
        draft = Unsteady(coupled=True)
        async with scripted_cluster(law_for(3), overlap=overlap, draft=draft, target=SLOW_TARGET) as cluster:
            got = await replies(cluster, 3, 12, **COUPLED)
        tokens.append([each.tokens for each in got])
        assert any(row.ran_ahead for row in rounds_of(got)) == (overlap != "off")
    assert tokens[0] == tokens[1] == tokens[2]


async def test_a_seed_under_the_plain_rule_runs_without() -> None:
    async with scripted_cluster(law_for(3), overlap="on", target=SLOW_TARGET) as cluster:
        seeded = [await cluster.generate(PROMPT, gamma=3, seed=5, max_tokens=30) for _ in range(2)]
        (unseeded,) = await replies(cluster, 3, 1)
    assert seeded[0].tokens == seeded[1].tokens
    assert not any(row.ran_ahead for row in rounds_of(seeded))
    assert any(row.ran_ahead for row in rounds_of([unseeded]))


async def test_no_number_serves_two_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every uniform that draft and coordinator ask for, over whole answers: each once, and rounds' indices ascend."""
    asked: Counter[tuple[int, int, int, Purpose]] = Counter()

    def counted(seed: int, index: int, offset: int, purpose: Purpose) -> float:
        asked[seed, index, offset, purpose] += 1
        return uniform(seed, index, offset, purpose)

    monkeypatch.setattr("services.coordinator.decide.uniform", counted)
    monkeypatch.setattr("tests.support.scripts.uniform", counted)
    async with scripted_cluster(law_for(3), overlap="on", draft=DraftScript(one_by_one=True)) as cluster:
        cluster.target.script = SLOW_TARGET
        asked.clear()
        got = await replies(cluster, 3, 16)
    assert {purpose for *_, purpose in asked} == set(Purpose)
    assert set(asked.values()) == {1}
    for each in got:
        indices = [row.index for row in rounds_of([each])]
        assert indices == sorted(set(indices))
    assert any(row.accepted > row.gamma for row in rounds_of(got))


# --- What must not be done with drafts that ran ahead, planted. ------------------------------------------------------


class _TestsByValue:
    """Has the last row test y1 only where that is not token 0."""

    def __get__(self, ahead: Ahead, _: Any) -> Sequence[Draft]:
        return [draft for draft in ahead._arrived[:1] if draft.token != 0]


async def _drops_by_value(ahead: Ahead) -> Proposal:
    """Hand on y2..yk only where y2 is not token 0."""
    proposal = await ahead._task
    rest = proposal.drafts[1:]
    return Proposal(rest if rest and rest[0].token != 0 else (), proposal.call)


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize(
    ("name", "planted"),
    [("first", _TestsByValue()), ("rest", _drops_by_value)],
    ids=["tests by value", "drops by value"],
)
async def test_a_planted_bias_is_found(name: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    law = law_for(3)
    monkeypatch.setattr(Ahead, name, planted)
    async with scripted_cluster(law, overlap="on", draft=DraftScript(one_by_one=True), target=SLOW_TARGET) as cluster:
        got = await replies(cluster, 1, 64)
    found = sorted(verdicts(answers_of(got), law.p(PLAIN)), key=lambda verdict: verdict.p_value)
    print("", *found, sep="\n")
    assert found[0].p_value < SIGNIFICANCE
