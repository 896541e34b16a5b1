"""Through three processes, greedily and in float32, the text is transformers' own, token for token.

Where it ever differs, `Reference.compare` shows that the two likeliest tokens were within float noise of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.real_model.conftest import PROMPTS
from tests.real_model.reference import Reference
from tests.real_model.serving import LENGTH, Serving

QUICK, OTHERS = PROMPTS[:4], PROMPTS[4:]

each_speculation = pytest.mark.parametrize(
    ("drafter", "gamma"), [("ngram", 0), ("ngram", 2), ("ngram", 5), ("random", 2), ("random", 5)]
)


@each_speculation
def test_equals_generate(drafter: str, gamma: int, serving: Serving, reference: Reference) -> None:
    assert count_differences(drafter, gamma, QUICK, serving, reference) <= 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@each_speculation
def test_equals_generate_on_the_other_prompts(drafter: str, gamma: int, serving: Serving, reference: Reference) -> None:
    assert count_differences(drafter, gamma, OTHERS, serving, reference) <= 2


@pytest.mark.slow
def test_equals_generate_with_a_model_drafter_that_is_not_asked(serving: Serving, reference: Reference) -> None:
    assert count_differences("random", 0, QUICK, serving, reference) <= 1


def test_equals_generate_with_the_target_as_its_own_draft(serving: Serving, reference: Reference) -> None:
    assert count_differences("itself", 5, QUICK[:2], serving, reference) == 0


def test_equals_generate_with_a_draft_that_is_not_used(serving: Serving, reference: Reference) -> None:
    reply = serving.greedy("other tokenizer", 5, QUICK[2])
    assert reference.compare(QUICK[2], reply.tokens, LENGTH) is None
    stats = reply.result.speculation
    assert stats.proposed == 0
    # The last round has no room for a draft, so it misses none.
    assert stats.degraded_rounds in (stats.rounds, stats.rounds - 1)
    assert "serving with gamma 0" in serving.coordinator("other tokenizer").log


def count_differences(drafter: str, gamma: int, prompts: Sequence[str], serving: Serving, reference: Reference) -> int:
    """Compare the answers to all prompts; return how many differ by float noise."""
    differences = []
    for prompt in prompts:
        reply = serving.greedy(drafter, gamma, prompt)
        assert list(reply.result.prompt_token_ids) == reference.chat(prompt)
        difference = reference.compare(prompt, reply.tokens, LENGTH)
        if difference is not None:
            differences.append(difference)
        whole = reply.result.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(reply.tokens) == LENGTH if whole else len(reply.tokens) < LENGTH
        assert reply.result.speculation.degraded_rounds == 0
    return len(differences)
