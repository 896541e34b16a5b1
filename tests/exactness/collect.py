"""Many answers from one cluster, and the cells of the proof."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.common.specdec.types import SamplingParams
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import Law, close_law
from tests.support.planted import PLAIN, PROCESSED
from tests.support.statistics import Answers

PROMPT = (0, 1)
LENGTH = 60
CONCURRENT = 64
# Large logits: where a softmax is taken in bfloat16 it shows.
LOGIT_OFFSET = 100.0
MODES = {"plain": PLAIN, "processed": PROCESSED}


def law_for(gamma: int) -> Law:
    """Return the tables for a gamma: the longer the round, the nearer the draft, so that its last offset is reached."""
    return close_law(distance=0.2 if gamma > 4 else 0.5, spread=0.6, seed=5, offset=LOGIT_OFFSET)


async def collect(
    cluster: Cluster, *, gamma: int, params: SamplingParams, requests: int, first_seed: int = 0, **fields: Any
) -> Answers:
    """Generate `requests` answers of 60 tokens, each with a seed of its own; `fields` are others of the request."""
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(seed: int) -> tuple[list[int], list[int]]:
        async with gate:
            reply = await cluster.generate(
                PROMPT, gamma=gamma, seed=seed, max_tokens=LENGTH, params=params, timeout_s=240, **fields
            )
        return reply.tokens, reply.offsets

    replies = await asyncio.gather(*(one(first_seed + i) for i in range(requests)))
    return Answers(PROMPT, np.array([tokens for tokens, _ in replies]), np.array([offsets for _, offsets in replies]))


@dataclass(frozen=True)
class Cell:
    """One undisturbed run of the proof.

    Attributes:
        gamma: Drafts in a round.
        mode: Of `MODES`.
        requests: How many answers; enough for the power that the test asserts.
    """

    gamma: int
    mode: str
    requests: int

    def run(self) -> Answers:
        """Run it in an event loop of its own."""

        async def generate() -> Answers:
            async with scripted_cluster(law_for(self.gamma), eos_ids=[3]) as cluster:
                params = MODES[self.mode]
                return await collect(cluster, gamma=self.gamma, params=params, requests=self.requests)

        return asyncio.run(generate())
