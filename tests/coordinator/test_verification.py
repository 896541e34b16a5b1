"""Which rule a request gets, who is told, and what may follow the clock then."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.specdec.types import SamplingParams, VerificationMode
from services.coordinator.clients.session import session_start
from services.coordinator.config import CoordinatorSettings
from services.coordinator.request import Target, plan
from services.coordinator.text import TextCodec
from tests.support.cluster import scripted_cluster
from tests.support.laws import close_law
from tests.support.tokenizers import CHAT_TEMPLATE, letter_tokenizer

UNSET = worker_pb2.VERIFICATION_UNSPECIFIED
TOKEN = worker_pb2.VERIFICATION_TOKEN
COUPLED = worker_pb2.VERIFICATION_COUPLED


@pytest.mark.parametrize(
    ("fields", "used", "may_adapt"),
    [
        ({}, TOKEN, True),
        ({"seed": 0}, COUPLED, True),
        ({"verification": TOKEN}, TOKEN, True),
        ({"verification": COUPLED}, COUPLED, True),
        ({"verification": COUPLED, "seed": 3}, COUPLED, True),
        ({"verification": TOKEN, "seed": 3}, TOKEN, False),
        ({"verification": TOKEN, "seed": 0, "gamma": 2}, TOKEN, False),
    ],
    ids=str,
)
def test_a_plan_has_the_rule_that_keeps_the_seeds_promise(
    fields: dict[str, Any], used: worker_pb2.Verification.ValueType, may_adapt: bool
) -> None:
    codec = TextCodec(letter_tokenizer(3).to_str().encode(), CHAT_TEMPLATE, {})
    target = Target(worker_pb2.ModelInfo(vocab_size=4, context_length=100), codec, SamplingParams())
    planned = plan(pb.GenerateRequest(text="abc", **fields), "id", target, CoordinatorSettings())
    assert planned.verification is (VerificationMode.COUPLED if used == COUPLED else VerificationMode.TOKEN)
    assert planned.may_adapt is may_adapt
    # Both workers draw by it.
    assert session_start(planned).verification == used


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("asked", [UNSET, TOKEN, COUPLED])
async def test_the_result_says_what_was_used_and_with_it_a_run_is_repeated(
    seed: int | None, asked: worker_pb2.Verification.ValueType
) -> None:
    async with scripted_cluster(close_law(distance=1.5, seed=3)) as cluster:
        first = await cluster.generate([0, 1], gamma=3, seed=seed, max_tokens=40, verification=asked)  # type: ignore[arg-type]
        used = first.result
        assert used.verification == (asked or (COUPLED if seed else TOKEN))
        again = await cluster.generate(
            [0, 1], gamma=used.gamma, seed=used.seed, max_tokens=40, verification=used.verification
        )
        alone = await cluster.generate([0, 1], gamma=0, seed=used.seed, max_tokens=40, verification=used.verification)
    assert again.tokens == first.tokens
    # Only the coupled rule gives the same without drafts.
    assert (alone.tokens == first.tokens) is (used.verification == COUPLED)
