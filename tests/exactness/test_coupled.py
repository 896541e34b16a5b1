"""The coupled rule over real gRPC: the law is p, and a seed has the same tokens whatever becomes of the drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline.v1 import worker_pb2
from services.common.specdec.analysis import agreement
from services.common.specdec.types import Row
from tests.exactness.collect import LENGTH, MODES, PROMPT, collect, law_for
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import Law, context, far
from tests.support.planted import COUPLED_PLANTS, LAWFUL, PLAIN, PLANTS, Plant
from tests.support.scripts import BadRow, DraftScript, TargetScript, Turn
from tests.support.statistics import SIGNIFICANCE, Answers, power, verdicts

COUPLED = {"verification": worker_pb2.VERIFICATION_COUPLED}
LAW = law_for(3)
REQUESTS = 100
# Answers that a test of equal tokens compares.
FEW = 2


@pytest.fixture(scope="module")
def alone() -> dict[str, Answers]:
    """What the target alone gives, by mode."""

    async def run() -> dict[str, Answers]:
        async with scripted_cluster(LAW, draft_address="", wait_for_draft=False) as cluster:
            return {
                mode: await collect(cluster, gamma=0, params=params, requests=REQUESTS, **COUPLED)
                for mode, params in MODES.items()
            }

    return asyncio.run(run())


def check_law(answers: Answers, law: Law, mode: str) -> None:
    found = list(verdicts(answers, law.p(MODES[mode])))
    print("", *found, sep="\n")
    assert not [str(verdict) for verdict in found if not verdict.passed]


async def check_same(
    cluster: Cluster, alone: Mapping[str, Answers], mode: str = "plain", gamma: int | None = 4, **fields: Any
) -> Answers:
    answers = await collect(cluster, gamma=gamma, params=MODES[mode], requests=FEW, **COUPLED | fields)
    np.testing.assert_array_equal(answers.tokens, alone[mode].tokens[:FEW])
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_law_of_the_target_alone(alone: dict[str, Answers], mode: str) -> None:
    p = LAW.p(MODES[mode]).reshape(-1, LAW.vocab_size)
    assert power(alone[mode].by_context(LAW.vocab_size), p, 0.06) > 0.99
    check_law(alone[mode], LAW, mode)


@pytest.mark.parametrize(("gamma", "mode"), [(1, "plain"), (3, "plain"), (3, "processed"), (8, "plain")])
async def test_law_and_tokens_with_drafts(alone: dict[str, Answers], gamma: int, mode: str) -> None:
    law = law_for(gamma)
    async with scripted_cluster(law) as cluster:
        answers = await collect(cluster, gamma=gamma, params=MODES[mode], requests=REQUESTS, **COUPLED)
    # The same law of p with a draft that is nearer where gamma is large, so the same tokens; and p at every offset.
    np.testing.assert_array_equal(answers.tokens, alone[mode].tokens)
    assert answers.offsets.max() == gamma
    check_law(answers, law, mode)


@pytest.mark.parametrize("plant", COUPLED_PLANTS, ids=lambda plant: plant.name)
async def test_a_planted_bias_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, replacement in plant.patches.items():
        monkeypatch.setattr(name, replacement)
    # Whole rows: a worker that chooses from a tail would do so by noise of its own.
    async with scripted_cluster(plant.law(LAW), partial_rows=False) as cluster:
        # Short rounds: most tokens then come after the draft, where some of these are.
        answers = await collect(cluster, gamma=1, params=PLAIN, requests=40, **COUPLED)
    found = sorted(verdicts(answers, LAW.p(PLAIN)), key=lambda verdict: verdict.p_value)
    print("", *found, sep="\n")
    assert found[0].p_value < SIGNIFICANCE


class Guesses(DraftScript):
    """As an n-gram drafter does: certain of its token, and seldom right."""

    def draw(self, turn: Turn, offset: int) -> int:
        return turn.tokens[-2]

    def q_row(self, turn: Turn, offset: int, token: int) -> Row:
        return Row.point_mass(token)


class OtherNoise(DraftScript):
    """Chooses by noise of its own."""

    def draw(self, turn: Turn, offset: int) -> int:
        turn.coupled = False
        return super().draw(turn, offset)


DISHONEST = [plant for plant in (*PLANTS, *LAWFUL) if not plant.patches and not plant.name.startswith("2")]
DRAFTS: dict[str, tuple[DraftScript, dict[str, Any]]] = {
    **{plant.name: (plant.draft, plant.settings) for plant in DISHONEST},
    **{f"bad row: {bad.name.lower()}": (DraftScript(bad_q=bad, bad_q_at=1), {}) for bad in BadRow},
    "guesses": (Guesses(), {}),
    "other noise": (OtherNoise(), {}),
    "lost now and then": (DraftScript(die_on=range(3, 1000, 7)), {}),
    "silent from some request on": (DraftScript(stall_on=range(9, 1000)), {"draft_timeout_s": 0.1}),
    "late now and then": (DraftScript(late_at=2, late_s=0.05, one_by_one=True), {"draft_timeout_s": 0.02}),
}


@pytest.mark.parametrize("draft", DRAFTS)
async def test_the_tokens_are_the_same_whatever_the_draft_does(alone: dict[str, Answers], draft: str) -> None:
    """Drafts that would bias the plain rule, too: here a draft decides nothing."""
    script, settings = DRAFTS[draft]
    async with scripted_cluster(LAW, draft=script, **settings) as cluster:
        await check_same(cluster, alone)


@pytest.mark.parametrize("gamma", [0, 1, 4, 8, None])
async def test_the_tokens_are_the_same_at_every_gamma(alone: dict[str, Answers], gamma: int | None) -> None:
    async with scripted_cluster(LAW) as cluster:
        answers = await check_same(cluster, alone, gamma=gamma)
        if gamma:
            assert answers.offsets.max() == gamma
            plain = await collect(
                cluster, gamma=gamma, params=PLAIN, requests=FEW, verification=worker_pb2.VERIFICATION_TOKEN
            )
            assert plain.tokens.tolist() != answers.tokens.tolist()


@pytest.mark.parametrize("gone", ["from the start", "in mid-text", "far from the target"])
async def test_the_tokens_are_the_same_without_the_draft(alone: dict[str, Answers], gone: str) -> None:
    law = far(LAW) if gone.startswith("far") else LAW
    async with scripted_cluster(law, draft_timeout_s=5.0) as cluster:
        if gone == "from the start":
            await cluster.draft.stop()
        if gone == "in mid-text":
            cluster.draft.script = DraftScript(die_on=range(5, 1000))
        await check_same(cluster, alone)


@pytest.mark.parametrize(("lost", "mode"), [("broken", "plain"), ("silent", "processed")])
async def test_the_tokens_are_the_same_when_the_target_is_lost(alone: dict[str, Answers], lost: str, mode: str) -> None:
    script = TargetScript(die_on={1, 4, 9}) if lost == "broken" else TargetScript(stall_on={2, 30})
    async with scripted_cluster(LAW, target=script, verify_timeout_s=0.5) as cluster:
        await check_same(cluster, alone, mode)
        assert cluster.target.streams > FEW


async def test_the_tokens_are_the_same_with_whole_rows(alone: dict[str, Answers]) -> None:
    async with scripted_cluster(LAW, partial_rows=False) as cluster:
        await check_same(cluster, alone)


@pytest.mark.parametrize("mode", MODES)
async def test_a_draft_by_the_same_noise_is_kept_as_often_as_the_formula_says(mode: str) -> None:
    """And one by other noise only as often as chance has them agree."""
    params = MODES[mode]
    kept: dict[str, float] = {}
    for name, script in (("same", DraftScript()), ("other", OtherNoise())):
        async with scripted_cluster(LAW, draft=script) as cluster:
            replies = [
                await cluster.generate(PROMPT, gamma=1, seed=seed, max_tokens=LENGTH, params=params, **COUPLED)
                for seed in range(12)
            ]
        chances: list[float] = []
        accepted = 0
        for reply in replies:
            text = list(PROMPT)
            rounds = reply.result.speculation.per_round
            for done in rounds:
                if done.tested:
                    p, q = LAW.p_rows(params)[context(text)], LAW.q_rows(params)[context(text)]
                    by_chance = float(p.dense(LAW.vocab_size) @ q.dense(LAW.vocab_size))
                    chances.append(agreement(p, q, LAW.vocab_size) if name == "same" else by_chance)
                    accepted += done.accepted
                text += reply.tokens[len(text) - len(PROMPT) :][: done.emitted]
        spread = float(np.sqrt(sum(chance * (1 - chance) for chance in chances)))
        assert stats.norm.sf(abs(accepted - sum(chances)) / spread) * 2 > SIGNIFICANCE
        kept[name] = accepted / len(chances)
    print(kept)
    assert kept["same"] > kept["other"] + 0.1
