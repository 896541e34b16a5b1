"""The counting notices every bias that it is there for: each is planted, and its test fails."""

from __future__ import annotations

import pytest

from services.common.specdec.types import SamplingParams
from tests.exactness.collect import collect, law_for
from tests.support.cluster import scripted_cluster
from tests.support.planted import PLAIN, PLANTS, Plant
from tests.support.statistics import SIGNIFICANCE, verdicts


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
async def test_a_planted_bias_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    law = plant.law(law_for(3))
    for name, replacement in plant.patches.items():
        monkeypatch.setattr(name, replacement)
    async with scripted_cluster(law, draft=plant.draft, target=plant.target, **plant.settings) as cluster:
        answers = await collect(cluster, gamma=3, params=plant.params, requests=plant.requests)
    found = sorted(verdicts(answers, law.p(plant.params)), key=lambda verdict: verdict.p_value)
    print("", *found, sep="\n")
    assert found[0].p_value < SIGNIFICANCE


@pytest.mark.parametrize("params", sorted({plant.params for plant in PLANTS} - {PLAIN}, key=str), ids=str)
async def test_without_the_plant_it_passes(params: SamplingParams) -> None:
    law = law_for(3)
    async with scripted_cluster(law) as cluster:
        answers = await collect(cluster, gamma=3, params=params, requests=30)
    assert not [str(verdict) for verdict in verdicts(answers, law.p(params)) if not verdict.passed]
