"""The drafter with a model: q is what was sampled from, nothing is fed twice, and it never fails for lack of room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.admission import AdmissionLimits
from services.common.engine.engine import Engine
from services.common.engine.processors import distributions
from services.common.engine.scheduler import PassLimits
from services.common.specdec.coupled import winner
from services.common.specdec.errors import CapacityError, InvalidFieldError, UnknownPrefixError
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, SamplingParams, VerificationMode
from services.draft_worker.model_proposer import ModelProposer, ModelProposeSession
from services.draft_worker.proposer import ProposalRequest, SessionRequest
from services.draft_worker.truncation import Truncation
from tests.support.engines import Library, StartEngine, held, load, recorded_passes
from tests.support.models import VOCAB, make_tiny_llama

PLAIN = SamplingParams()
FILTERED = SamplingParams(0.7, 20, 0.9, 0.01)
PROMPT = list(range(2, 22))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "draft", context=64)


@pytest.fixture(scope="module")
def library(folder: Path) -> Library:
    return Library(folder)


@pytest.fixture
async def engine(folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(folder, passes=PassLimits(prefill_chunk=8), admission=AdmissionLimits(8, 0))


@pytest.fixture
def proposer(engine: Engine) -> ModelProposer:
    return ModelProposer(engine)


def law(library: Library, text: list[int], params: SamplingParams) -> np.ndarray:
    (row,) = distributions(library.logits(text, 1), params)
    return row.dense(VOCAB)


async def propose(
    session: ModelProposeSession, round_index: int, base_length: int, tokens: list[int], gamma: int
) -> list[Draft]:
    groups = [group async for group in session.propose(ProposalRequest(round_index, base_length, tokens, gamma))]
    assert all(len(group) == 1 for group in groups), "one by one, as they are sampled"
    return [group[0] for group in groups]


@pytest.mark.parametrize("params", [PLAIN, FILTERED, SamplingParams(0.0)])
async def test_the_reported_q_is_what_the_token_was_sampled_from(
    library: Library, proposer: ModelProposer, params: SamplingParams
) -> None:
    session = await proposer.open(SessionRequest(params, seed=9, prompt_length=20, max_new_tokens=40))
    drafts = await propose(session, 5, 0, PROMPT, gamma=6)
    assert len(drafts) == 6
    text = list(PROMPT)
    for offset, draft in enumerate(drafts):
        assert draft.token == sample(draft.q, uniform(9, 5, offset, Purpose.DRAFT))
        np.testing.assert_allclose(draft.q.dense(VOCAB), law(library, text, params), atol=1e-5)
        text.append(draft.token)


@pytest.mark.parametrize("params", [PLAIN, FILTERED, SamplingParams(0.0)])
async def test_a_truncated_q_is_what_the_token_was_sampled_from(
    library: Library, engine: Engine, params: SamplingParams
) -> None:
    session = await ModelProposer(engine, Truncation(top_k=4)).open(SessionRequest(params, 9, 20, 40))
    text = list(PROMPT)
    for offset, draft in enumerate(await propose(session, 5, 0, PROMPT, gamma=6)):
        assert draft.token == sample(draft.q, uniform(9, 5, offset, Purpose.DRAFT))
        assert draft.q.ids is not None
        q = law(library, text, params)
        head = np.sort(np.argsort(-q, kind="stable")[:4])
        head = head[q[head] > 0]
        np.testing.assert_array_equal(draft.q.ids, head)
        np.testing.assert_allclose(draft.q.weights, q[head] / q[head].sum(), atol=1e-5)
        text.append(draft.token)


@pytest.mark.parametrize("params", [PLAIN, FILTERED])
async def test_under_the_coupled_rule_a_draft_is_the_winner_of_q_at_its_place_in_the_text(
    library: Library, proposer: ModelProposer, params: SamplingParams
) -> None:
    session = await proposer.open(SessionRequest(params, 9, 20, 40, VerificationMode.COUPLED))
    drafts = await propose(session, 5, 0, PROMPT, gamma=6)
    text = list(PROMPT)
    for draft in drafts:
        assert draft.token == winner(draft.q, 9, len(text)).token
        np.testing.assert_allclose(draft.q.dense(VOCAB), law(library, text, params), atol=1e-5)
        text.append(draft.token)
    # In whichever round, and however the text was handed over: the same token at the same place.
    again = await propose(session, 6, 22, [], gamma=4)
    assert [draft.token for draft in again] == text[22:]


async def test_drafts_are_a_function_of_seed_and_round(proposer: ModelProposer) -> None:
    async def tokens(seed: int, round_index: int) -> list[int]:
        session = await proposer.open(SessionRequest(PLAIN, seed, prompt_length=20, max_new_tokens=40))
        drafts = await propose(session, round_index, 0, PROMPT, gamma=8)
        session.close()
        return [draft.token for draft in drafts]

    first = await tokens(1, 0)
    assert await tokens(1, 0) == first
    assert await tokens(2, 0) != first
    assert await tokens(1, 1) != first


async def test_a_repeated_round_proposes_the_same(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(FILTERED, 3, 20, 40))
    first = await propose(session, 0, 0, PROMPT, gamma=4)
    again = await propose(session, 0, 20, [], gamma=4)
    assert [draft.token for draft in first] == [draft.token for draft in again]


async def test_nothing_is_fed_twice(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 40))
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


async def test_a_consumer_that_stops_leaves_a_session_that_works(library: Library, proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 40))
    drafts = session.propose(ProposalRequest(0, 0, PROMPT, 8))
    (first,) = await anext(drafts)
    await drafts.aclose()
    (second,) = await propose(session, 1, 21, [], gamma=1)
    np.testing.assert_allclose(second.q.dense(VOCAB), law(library, [*PROMPT, first.token], PLAIN), atol=1e-5)


async def test_a_consumer_cancelled_in_mid_pass_leaves_a_session_that_works(proposer: ModelProposer) -> None:
    whole = [
        d.token
        for d in await propose(await proposer.open(SessionRequest(PLAIN, 1, 20, 40)), 7, 0, [*PROMPT, 3], gamma=5)
    ]
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 40))
    for _ in range(10):
        task = asyncio.create_task(propose(session, 0, 0, PROMPT, gamma=8))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # The cancelled round may still be in its pass; this one comes after it.
        assert [d.token for d in await propose(session, 7, 0, [*PROMPT, 3], gamma=5)] == whole


async def test_it_stops_where_its_context_ends(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, prompt_length=60, max_new_tokens=1000))
    drafts = await propose(session, 0, 0, [5] * 60, gamma=8)
    assert len(drafts) == 5, "64 tokens can be fed, so the law of the 65th is known"
    assert await propose(session, 1, 65, [6], gamma=8) == []
    # A text that grows on without it, and one that is cut back.
    assert await propose(session, 2, 66, [6] * 10, gamma=8) == []
    assert len(await propose(session, 3, 61, [7], gamma=8)) == 3


async def test_it_stops_where_its_reservation_ends(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, prompt_length=4, max_new_tokens=2))
    assert len(await propose(session, 0, 0, [5] * 4, gamma=8)) == 3
    assert await propose(session, 0, 0, [5] * 7, gamma=8) == []


async def test_nothing_to_go_by(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 20))
    assert await propose(session, 0, 0, [], gamma=4) == []
    assert await propose(session, 0, 0, PROMPT, gamma=0) == []


async def test_errors_change_nothing(proposer: ModelProposer) -> None:
    session = await proposer.open(SessionRequest(PLAIN, 1, 20, 20))
    await propose(session, 0, 0, PROMPT, gamma=1)
    with pytest.raises(UnknownPrefixError) as caught:
        await propose(session, 1, 22, [3], gamma=1)
    assert caught.value.known_length == 21
    with pytest.raises(InvalidFieldError, match=r"tokens\[0\] is 320"):
        await propose(session, 1, 20, [VOCAB], gamma=1)
    assert len(await propose(session, 1, 21, [3], gamma=1)) == 1


async def test_proposals_with_different_gammas_share_passes_step_by_step(
    proposer: ModelProposer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gammas = [1, 3, 5, 2]
    prompts = [[10 + i, *range(2, 5 + i)] for i in range(4)]

    async def drafts_of(i: int) -> list[Draft]:
        session = await proposer.open(SessionRequest(PLAIN, seed=i, prompt_length=10, max_new_tokens=20))
        drafts = await propose(session, 3, 0, prompts[i], gammas[i])
        session.close()
        return drafts

    alone = [await drafts_of(i) for i in range(4)]
    hold, holding = await held(await engine.open(1))
    passes = recorded_passes(engine, monkeypatch)
    together = [asyncio.create_task(drafts_of(i)) for i in range(4)]
    while engine.queue < 5:
        await asyncio.sleep(0)
    hold.release()
    await holding
    for first, drafts in zip(alone, await asyncio.gather(*together), strict=True):
        assert [draft.token for draft in drafts] == [draft.token for draft in first]
        for one, other in zip(first, drafts, strict=True):
            np.testing.assert_allclose(one.q.dense(VOCAB), other.q.dense(VOCAB), atol=1e-5)
    # The prompts' 3 + 4 + 5 + 6 positions, 8 of them a pass without logits; from then on one position each.
    assert len(passes) <= max(gammas) + 1
    assert sum(len(feed.tokens) for feeds in passes for feed in feeds) == sum(map(len, prompts)) + sum(
        gamma - 1 for gamma in gammas
    )
    assert max(len(feeds) for feeds in passes) >= 3


async def test_sessions_are_limited_and_freed(proposer: ModelProposer, engine: Engine) -> None:
    first, *_ = [await proposer.open(SessionRequest(PLAIN, 1, 5, 5)) for _ in range(8)]
    with pytest.raises(CapacityError, match=r"8 of 8 sessions \(--max-sessions\)"):
        await proposer.open(SessionRequest(PLAIN, 1, 5, 5))
    first.close()
    first.close()
    assert engine.memory.sessions == 7
    await proposer.open(SessionRequest(PLAIN, 1, 5, 5))


async def test_a_broken_model_proposes_nothing(
    folder: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    broken = load(folder)
    engine = await start_engine(broken)
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    proposer = ModelProposer(engine)
    for _ in range(2):
        session = await proposer.open(SessionRequest(PLAIN, 1, 20, 20))
        for round_index in range(3):
            assert await propose(session, round_index, 0, PROMPT, gamma=4) == []
    assert caplog.text.count("not finite after 20 tokens") == 1, "told once, not in each round and session"
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(1.0)
    assert len(await propose(session, 3, 0, PROMPT, gamma=4)) == 4
