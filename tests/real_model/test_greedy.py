"""Through three processes, greedily and in float32, the text is transformers' own, token for token.

Where it ever differs, `Reference.compare` shows that the two likeliest tokens were within float noise of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.real_model.conftest import PROMPTS
from tests.real_model.reference import Reference
from tests.real_model.serving import LENGTH, Serving

QUICK, OTHERS = PROMPTS[:4], PROMPTS[4:]
Compare = Callable[[str, int, Sequence[str]], int]

QUICKLY = [("ngram", 0), ("ngram", 5), ("random", 2), ("trained", 4)]
OTHERWISE = [("ngram", 2), ("random", 5)]


@pytest.fixture
def compare(serving: Serving, reference: Reference) -> Compare:
    """Compare a drafter's answers to prompts with the reference's; return how many differ by float noise."""

    def count_differences(drafter: str, gamma: int, prompts: Sequence[str]) -> int:
        replies = serving.greedy_answers(drafter, gamma, prompts)
        for prompt, reply in zip(prompts, replies, strict=True):
            assert list(reply.result.prompt_token_ids) == reference.chat(prompt)
            assert reply.result.speculation.degraded_rounds == 0
            whole = reply.result.finish_reason == pb.FINISH_REASON_LENGTH
            assert len(reply.tokens) == LENGTH if whole else len(reply.tokens) < LENGTH
        compared = [
            reference.compare(prompt, reply.tokens, LENGTH) for prompt, reply in zip(prompts, replies, strict=True)
        ]
        differences = [difference for difference in compared if difference is not None]
        print(f"{drafter}, gamma {gamma}: {len(differences)} of {len(prompts)} answers differ {differences}")
        return len(differences)

    return count_differences


@pytest.mark.parametrize(
    ("drafter", "gamma"), [*QUICKLY, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERWISE)]
)
def test_equals_generate(drafter: str, gamma: int, compare: Compare) -> None:
    assert compare(drafter, gamma, QUICK) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("drafter", "gamma"), [*QUICKLY, *OTHERWISE])
def test_equals_generate_on_the_other_prompts(drafter: str, gamma: int, compare: Compare) -> None:
    assert compare(drafter, gamma, OTHERS) <= 2


@pytest.mark.slow
def test_equals_generate_with_a_model_drafter_that_is_not_asked(compare: Compare) -> None:
    assert compare("random", 0, QUICK[:2]) <= 1


def test_equals_generate_with_the_target_as_its_own_draft(compare: Compare) -> None:
    assert compare("itself", 5, QUICK[:1]) == 0


def test_the_trained_draft_is_worth_something(serving: Serving) -> None:
    replies = serving.greedy_answers("trained", 4, QUICK)
    accepted = sum(reply.result.speculation.accepted for reply in replies)
    tested = sum(reply.result.speculation.tested for reply in replies)
    print(f"{accepted} of {tested} drafts kept")
    assert accepted > 0.2 * tested > 0


def test_equals_generate_with_a_draft_that_is_not_used(serving: Serving, reference: Reference) -> None:
    reply = serving.greedy("other tokenizer", 5, QUICK[2])
    assert reference.compare(QUICK[2], reply.tokens, LENGTH) is None
    stats = reply.result.speculation
    assert stats.proposed == 0
    # The last round has no room for a draft, so it misses none.
    assert stats.degraded_rounds in (stats.rounds, stats.rounds - 1)
    assert "serving with gamma 0" in serving.coordinator("other tokenizer").log
