"""Gamma chosen round by round, from the clock and from what was kept before: the law is p at every offset."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from services.coordinator.gamma import AdaptiveGamma
from services.coordinator.types import Round
from tests.exactness.collect import LENGTH, PROMPT, law_for
from tests.support.cluster import scripted_cluster
from tests.support.planted import PLAIN
from tests.support.statistics import Answers, verdicts


async def test_law_at_a_gamma_that_adapts(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = AdaptiveGamma.observe

    def by_script(policy: AdaptiveGamma, done: Round) -> None:
        """Learn with costs of our own: drafts that are neither free nor dear, so that gamma follows what was kept."""
        target = dataclasses.replace(done.target, elapsed_s=0.02, batch_size=1, pass_tokens=done.proposed + 1)
        learn(policy, dataclasses.replace(done, target=target, total_s=0.021 + 0.005 * done.proposed))

    monkeypatch.setattr(AdaptiveGamma, "observe", by_script)
    law = law_for(3)
    gammas: set[int] = set()
    async with scripted_cluster(law, max_gamma=5, default_gamma=4) as cluster:
        gate = asyncio.Semaphore(32)

        async def one() -> tuple[list[int], list[int]]:
            async with gate:
                # Without a seed: with one the rule would be COUPLED.
                fields = {"seed": None}
                reply = await cluster.generate(PROMPT, max_tokens=LENGTH, params=PLAIN, timeout_s=240, **fields)
            assert reply.result.adaptive_gamma
            assert reply.result.gamma == 5
            gammas.update(done.gamma for done in reply.result.speculation.per_round)
            return reply.tokens, reply.offsets

        replies = await asyncio.gather(*(one() for _ in range(60)))
    answers = Answers(PROMPT, np.array([r[0] for r in replies]), np.array([r[1] for r in replies]))
    assert len(gammas) > 3
    assert not [str(verdict) for verdict in verdicts(answers, law.p(PLAIN)) if not verdict.passed]
