"""What good and bad drafts of a real model are worth."""

from __future__ import annotations

import pytest

from paceline.v1 import worker_pb2
from tests.real_model.conftest import PROMPTS
from tests.real_model.serving import LENGTH, Serving, chat


def test_the_target_as_its_own_draft_is_nearly_always_right(serving: Serving) -> None:
    stats = serving.greedy("itself", 5, PROMPTS[0]).result.speculation
    assert stats.tested >= 50
    assert stats.alpha >= 0.999


@pytest.mark.parametrize("length", [LENGTH // 2, pytest.param(2 * LENGTH, marks=pytest.mark.slow)])
def test_the_target_as_its_own_draft_is_nearly_always_right_at_temperature_1(serving: Serving, length: int) -> None:
    reply = serving.generate(
        "itself",
        chat=chat(PROMPTS[3]),
        gamma=5,
        max_tokens=length,
        seed=1,
        sampling=worker_pb2.SamplingParams(temperature=1.0),
        stop={"ignore_eos": True},
    )
    stats = reply.result.speculation
    assert stats.tested >= 0.8 * length
    assert stats.alpha >= 0.999


def test_a_random_draft_is_nearly_always_wrong(serving: Serving) -> None:
    stats = serving.greedy("random", 2, PROMPTS[0]).result.speculation
    assert stats.proposed >= 100
    assert stats.alpha <= 0.1
