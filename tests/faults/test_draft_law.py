"""A draft that dies, stalls, pauses and returns at random: its tokens are not promised, the law of the text is."""

from __future__ import annotations

import random

from services.common.specdec.randomness import Purpose, uniform
from tests.exactness.collect import collect, law_for
from tests.support.cluster import scripted_cluster
from tests.support.planted import PLAIN
from tests.support.scripts import DraftScript, Turn
from tests.support.statistics import power, verdicts

GAMMA = 3
TIMEOUT_S = 1.0
# Of requests, of requests, of drafts.
DIES, STALLS, PAUSES = 0.03, 0.002, 0.01
# Any key but a request's seed: faults must not depend on what the rule or the draft draws.
FAULTS = 2**40


def some(share: float, seed: int) -> frozenset[int]:
    """Return a share of the requests, chosen by their number alone."""
    chosen = random.Random(seed)
    return frozenset(n for n in range(1, 200_000) if chosen.random() < share)


class Unruly(DraftScript):
    """Fails at random, never because of a token."""

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        number = uniform(FAULTS + turn.seed, turn.round, offset, Purpose.ACCEPT)
        return 2 * TIMEOUT_S if number < PAUSES else 0.0


async def test_the_law_whatever_happens_to_the_draft() -> None:
    law = law_for(GAMMA)
    script = Unruly(die_on=some(DIES, 1), stall_on=some(STALLS, 2))
    async with scripted_cluster(law, draft=script, draft_timeout_s=TIMEOUT_S) as cluster:
        answers = await collect(cluster, gamma=GAMMA, params=PLAIN, requests=300)
        asked, opened = cluster.draft.requests, cluster.draft.streams
    p = law.p(PLAIN)
    for offset in range(GAMMA + 1):
        at = answers.by_context(law.vocab_size, answers.offsets == offset)
        assert power(at, p.reshape(-1, law.vocab_size), 0.1) > 0.99
    found = list(verdicts(answers, p))
    print("", f"{asked} requests, {opened} streams for 300 answers", *found, sep="\n")
    assert opened > 220
    assert not [str(verdict) for verdict in found if not verdict.passed]
