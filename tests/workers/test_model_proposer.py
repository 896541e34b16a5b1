"""The drafter with a model: q is what was sampled from, nothing is fed twice, and it never fails for lack of room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.executor import PassExecutor
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.processors import distributions
from services.common.specdec.errors import CapacityError, InvalidFieldError, UnknownPrefixError
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, SamplingParams
from services.draft_worker.model_proposer import ModelProposer, ModelProposeSession
from tests.support.models import VOCAB, make_tiny_llama

PLAIN = SamplingParams()
FILTERED = SamplingParams(0.7, 20, 0.9, 0.01)
PROMPT = list(range(2, 22))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "draft", context=64)
    return load_model(LoadOptions(str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def proposer(loaded: LoadedModel, executor: PassExecutor) -> ModelProposer:
    return ModelProposer(loaded, executor, max_sessions=3, prefill_chunk=8)


async def propose(
    session: ModelProposeSession, round_index: int, base_length: int, tokens: list[int], gamma: int
) -> list[Draft]:
    groups = [group async for group in session.propose(round_index, base_length, tokens, gamma)]
    assert all(len(group) == 1 for group in groups), "one by one, as they are sampled"
    return [group[0] for group in groups]


@pytest.mark.parametrize("params", [PLAIN, FILTERED, SamplingParams(0.0)])
async def test_the_reported_q_is_what_the_token_was_sampled_from(
    loaded: LoadedModel, proposer: ModelProposer, params: SamplingParams
) -> None:
    session = await proposer.open(params, seed=9, prompt_length=20, max_new_tokens=40)
    drafts = await propose(session, 5, 0, PROMPT, gamma=6)
    assert len(drafts) == 6
    text = list(PROMPT)
    for offset, draft in enumerate(drafts):
        assert draft.token == sample(draft.q, uniform(9, 5, offset, Purpose.DRAFT))
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([text]), use_cache=False).logits[0, -1:]
            (expected,) = distributions(logits, params)
        np.testing.assert_allclose(draft.q.dense(VOCAB), expected.dense(VOCAB), atol=1e-5)
        text.append(draft.token)


async def test_drafts_are_a_function_of_seed_and_round(proposer: ModelProposer) -> None:
    async def tokens(seed: int, round_index: int) -> list[int]:
        session = await proposer.open(PLAIN, seed, prompt_length=20, max_new_tokens=40)
        drafts = await propose(session, round_index, 0, PROMPT, gamma=8)
        session.close()
        return [draft.token for draft in drafts]

    first = await tokens(1, 0)
    assert await tokens(1, 0) == first
    assert await tokens(2, 0) != first
    assert await tokens(1, 1) != first


async def test_a_repeated_round_proposes_the_same(proposer: ModelProposer) -> None:
    session = await proposer.open(FILTERED, 3, 20, 40)
    first = await propose(session, 0, 0, PROMPT, gamma=4)
    again = await propose(session, 0, 20, [], gamma=4)
    assert [draft.token for draft in first] == [draft.token for draft in again]


async def test_nothing_is_fed_twice(proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, 20, 40)
    await propose(session, 0, 0, PROMPT, gamma=4)
    assert session.timing.forward_tokens == 20 + 3, "the prompt, and all drafts but the last"
    # All four were kept: the last one and the bonus token are new to the model.
    await propose(session, 1, 24, [7], gamma=4)
    assert session.timing.forward_tokens == 2 + 3
    # One was kept, then the residual.
    await propose(session, 2, 26, [8], gamma=4)
    assert session.timing.forward_tokens == 1 + 3
    # None was kept.
    await propose(session, 3, 27, [9], gamma=1)
    assert session.timing.forward_tokens == 1


async def test_a_consumer_that_stops_leaves_a_session_that_works(loaded: LoadedModel, proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, 20, 40)
    drafts = session.propose(0, 0, PROMPT, 8)
    (first,) = await anext(drafts)
    await drafts.aclose()
    (second,) = await propose(session, 1, 21, [], gamma=1)
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*PROMPT, first.token]]), use_cache=False).logits[0, -1:]
        (expected,) = distributions(logits, PLAIN)
    np.testing.assert_allclose(second.q.dense(VOCAB), expected.dense(VOCAB), atol=1e-5)


async def test_a_consumer_cancelled_in_mid_pass_leaves_a_session_that_works(proposer: ModelProposer) -> None:
    whole = [d.token for d in await propose(await proposer.open(PLAIN, 1, 20, 40), 7, 0, [*PROMPT, 3], gamma=5)]
    session = await proposer.open(PLAIN, 1, 20, 40)
    for _ in range(10):
        task = asyncio.create_task(propose(session, 0, 0, PROMPT, gamma=8))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # The cancelled round may still be in its pass; this one comes after it.
        assert [d.token for d in await propose(session, 7, 0, [*PROMPT, 3], gamma=5)] == whole


async def test_it_stops_where_its_context_ends(proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, prompt_length=60, max_new_tokens=1000)
    drafts = await propose(session, 0, 0, [5] * 60, gamma=8)
    assert len(drafts) == 5, "64 tokens can be fed, so the law of the 65th is known"
    assert await propose(session, 1, 65, [6], gamma=8) == []
    # A text that grows on without it, and one that is cut back.
    assert await propose(session, 2, 66, [6] * 10, gamma=8) == []
    assert len(await propose(session, 3, 61, [7], gamma=8)) == 3


async def test_it_stops_where_its_reservation_ends(proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, prompt_length=4, max_new_tokens=2)
    assert len(await propose(session, 0, 0, [5] * 4, gamma=8)) == 3
    assert await propose(session, 0, 0, [5] * 7, gamma=8) == []


async def test_nothing_to_go_by(proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, 20, 20)
    assert await propose(session, 0, 0, [], gamma=4) == []
    assert await propose(session, 0, 0, PROMPT, gamma=0) == []


async def test_errors_change_nothing(proposer: ModelProposer) -> None:
    session = await proposer.open(PLAIN, 1, 20, 20)
    await propose(session, 0, 0, PROMPT, gamma=1)
    with pytest.raises(UnknownPrefixError) as caught:
        await propose(session, 1, 22, [3], gamma=1)
    assert caught.value.known_length == 21
    with pytest.raises(InvalidFieldError, match=r"tokens\[0\] is 320"):
        await propose(session, 1, 20, [VOCAB], gamma=1)
    assert len(await propose(session, 1, 21, [3], gamma=1)) == 1


async def test_sessions_are_limited_and_freed(proposer: ModelProposer) -> None:
    first, *_ = [await proposer.open(PLAIN, 1, 5, 5) for _ in range(3)]
    with pytest.raises(CapacityError, match="all 3 sessions"):
        await proposer.open(PLAIN, 1, 5, 5)
    first.close()
    first.close()
    assert proposer.sessions_open == 2


async def test_a_broken_model_proposes_nothing(
    tmp_path: Path, executor: PassExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    broken = load_model(LoadOptions(str(make_tiny_llama(tmp_path / "nan")), dtype="float32", device="cpu"))
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    session = await ModelProposer(broken, executor, max_sessions=1).open(PLAIN, 1, 20, 20)
    assert await propose(session, 0, 0, PROMPT, gamma=4) == []
    assert "not finite after 20 tokens" in caplog.text
