"""No position goes through a model twice: what the workers say they fed, against what a round adds.

A prompt that another session has had is copied from its cache, and not fed at all.
"""

from __future__ import annotations

import itertools

import pytest

from paceline.v1 import worker_pb2
from tests.real_model.conftest import PROMPTS
from tests.real_model.serving import Serving
from tests.support.cluster import Reply


@pytest.mark.parametrize(("drafter", "gamma"), [("ngram", 0), ("ngram", 5), ("random", 2), ("itself", 5)])
def test_the_target_is_fed_the_prompt_once_and_then_what_each_round_adds(
    serving: Serving, drafter: str, gamma: int
) -> None:
    reply = serving.greedy(drafter, gamma, PROMPTS[0])
    rounds = reply.result.speculation.per_round
    prompt = reply.result.usage.prompt_tokens
    # The token that a round adds to its drafts has not been through the model, whichever origin it has.
    expected = [(prompt if done.index == 0 else 1) + done.proposed for done in rounds]
    assert [had(done.target) for done in rounds] == expected
    assert not any(done.target.reused_tokens for done in rounds[1:])
    assert sum(expected) == prompt + reply.result.speculation.proposed + len(rounds) - 1


@pytest.mark.parametrize(
    ("drafter", "gamma"),
    [("random", 2), ("itself", 5), *(pytest.param(name, 5, marks=pytest.mark.slow) for name in ("random", "noisy"))],
)
def test_a_model_draft_is_fed_the_prompt_once_and_then_what_each_round_adds(
    serving: Serving, drafter: str, gamma: int
) -> None:
    reply = serving.greedy(drafter, gamma, PROMPTS[0])
    asked = [done for done in reply.result.speculation.per_round if done.gamma]
    prompt = reply.result.usage.prompt_tokens
    # A round's first draft needs the tokens before it, each further one the draft before it; the last draft is not fed.
    expected = [prompt + asked[0].gamma - 1]
    for before, done in itertools.pairwise(asked):
        # A rejection leaves one new token to feed, its replacement. After full acceptance the bonus token is new, and
        # the last draft has yet to be caught up with.
        new = 2 if before.accepted == before.proposed else 1
        expected.append(new + done.gamma - 1)
    assert [had(done.draft) for done in asked] == expected
    assert not any(done.draft.reused_tokens for done in asked[1:])
    assert all(done.proposed == done.gamma for done in asked)


@pytest.mark.slow
def test_the_drafts_of_these_tests_are_kept_all_in_part_and_not_at_all(serving: Serving) -> None:
    def kept(drafter: str) -> tuple[bool, bool, bool]:
        rounds = _asked(serving.greedy(drafter, 5, PROMPTS[0]))
        return (
            any(accepted == gamma for accepted, gamma in rounds),
            any(0 < accepted < gamma for accepted, gamma in rounds),
            any(accepted == 0 for accepted, _ in rounds),
        )

    assert kept("itself") == (True, False, False)
    assert kept("random")[2]
    assert kept("noisy")[1]


def had(timing: worker_pb2.WorkerTiming) -> int:
    """Return the positions that a request brought into a cache."""
    return timing.forward_tokens + timing.reused_tokens


def _asked(reply: Reply) -> list[tuple[int, int]]:
    return [(done.accepted, done.gamma) for done in reply.result.speculation.per_round if done.gamma]
