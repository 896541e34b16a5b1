"""The service by counting: over real gRPC, the next token given its context is drawn from p, at every offset.

`make test` runs gamma 3 at a size that finds a bias of .07 at one offset; the slow proof runs every gamma at a size
that finds .02. Both assert that power from the counts that they got.
"""

from __future__ import annotations

import numpy as np
import pytest

from services.common.specdec.types import SamplingParams
from tests.exactness.collect import LENGTH, MODES, PROMPT, Cell, collect, law_for
from tests.support.cluster import scripted_cluster
from tests.support.laws import Law, context, far
from tests.support.planted import LAWFUL, PLAIN, Plant
from tests.support.scripts import BadRow, DraftScript
from tests.support.statistics import Answers, power, verdicts

SMALL = [Cell(3, mode, 230) for mode in MODES]
LARGE = [
    Cell(1, "plain", 1000),
    Cell(1, "processed", 1100),
    Cell(3, "plain", 2300),
    Cell(3, "processed", 2600),
    Cell(8, "plain", 5300),
    Cell(8, "processed", 6000),
]


def check(answers: Answers, law: Law, mode: str) -> None:
    found = list(verdicts(answers, law.p(MODES[mode])))
    print("", *found, sep="\n")
    assert not [str(verdict) for verdict in found if not verdict.passed]


def check_power(answers: Answers, law: Law, mode: str, gamma: int, shift: float) -> None:
    p = law.p(MODES[mode]).reshape(-1, law.vocab_size)
    powers = [
        power(answers.by_context(law.vocab_size, answers.offsets == offset), p, shift) for offset in range(gamma + 1)
    ]
    print("power for a bias of", shift, "by offset:", *(f"{value:.4f}" for value in powers))
    assert min(powers) > 0.99


@pytest.mark.parametrize("cell", SMALL, ids=str)
def test_law_at_gamma_3(cell: Cell) -> None:
    answers, law = cell.run(), law_for(cell.gamma)
    check_power(answers, law, cell.mode, cell.gamma, shift=0.07)
    check(answers, law, cell.mode)


@pytest.mark.parametrize("mode", MODES)
async def test_law_with_a_far_draft(mode: str) -> None:
    law = far(law_for(3))
    assert law.alpha(MODES[mode]) < 0.6
    async with scripted_cluster(law) as cluster:
        answers = await collect(cluster, gamma=3, params=MODES[mode], requests=40)
    check(answers, law, mode)


@pytest.mark.parametrize("plant", LAWFUL, ids=lambda plant: plant.name)
async def test_law_whatever_the_draft_does(plant: Plant) -> None:
    law = plant.law(law_for(3))
    async with scripted_cluster(law, draft=plant.draft, target=plant.target, **plant.settings) as cluster:
        answers = await collect(cluster, gamma=3, params=plant.params, requests=40)
    check(answers, law, "plain")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("bad", BadRow)
async def test_a_bad_row_costs_the_drafts_from_its_position_on(bad: BadRow, at: int) -> None:
    """Whatever is wrong with the row, the answer is that of a draft that stops there."""
    async with scripted_cluster(law_for(3), draft=DraftScript(bad_q=bad, bad_q_at=at)) as cluster:
        spoilt = await collect(cluster, gamma=3, params=PLAIN, requests=4)
        cluster.draft.script = DraftScript(stop_at=at)
        stopped = await collect(cluster, gamma=3, params=PLAIN, requests=4)
    assert spoilt.offsets.max() == at
    np.testing.assert_array_equal(spoilt.tokens, stopped.tokens)
    np.testing.assert_array_equal(spoilt.offsets, stopped.offsets)


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
async def test_greedy_is_the_targets_own_walk(gamma: int) -> None:
    law, greedy = law_for(3), SamplingParams(temperature=0)
    walk = list(PROMPT)
    for _ in range(LENGTH):
        walk.append(int(law.p(greedy)[context(walk)].argmax()))
    async with scripted_cluster(law) as cluster:
        answers = await collect(cluster, gamma=gamma, params=greedy, requests=1)
    assert answers.tokens[0].tolist() == walk[len(PROMPT) :]


async def test_a_seed_promises_the_tokens_whatever_else_runs() -> None:
    async with scripted_cluster(law_for(3)) as cluster:
        together = await collect(cluster, gamma=3, params=PLAIN, requests=40)
        for seed in (0, 17, 39):
            alone = await collect(cluster, gamma=3, params=PLAIN, requests=1, first_seed=seed)
            assert alone.tokens[0].tolist() == together.tokens[seed].tolist()
    assert len({tuple(tokens) for tokens in together.tokens.tolist()}) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", LARGE, ids=str)
def test_law_at_every_gamma(cell: Cell) -> None:
    answers, law = cell.run(), law_for(cell.gamma)
    check_power(answers, law, cell.mode, cell.gamma, shift=0.02)
    check(answers, law, cell.mode)
