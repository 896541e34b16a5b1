"""Proposals that are overtaken before they begin: what follows builds on what they brought, not on older drafts."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions
from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.types import Draft, SamplingParams
from services.draft_worker.model_proposer import ModelProposer, ModelProposeSession
from services.draft_worker.proposer import ProposalRequest, SessionRequest
from tests.support.engines import Library, StartEngine, held, random_tokens
from tests.support.models import VOCAB, make_tiny_llama

PLAIN = SamplingParams()
PROMPT = random_tokens(random.Random(1), 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture
async def engine(folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(folder)


async def propose(session: ModelProposeSession, index: int, base: int, tokens: list[int], gamma: int) -> list[Draft]:
    return [draft async for drafts in session.propose(ProposalRequest(index, base, tokens, gamma)) for draft in drafts]


def check_follows(draft: Draft, folder: Path, text: list[int]) -> None:
    (row,) = distributions(Library(folder).logits(text, 1), PLAIN)
    np.testing.assert_allclose(draft.q.dense(VOCAB), row.dense(VOCAB), atol=1e-5)


async def test_one_for_no_drafts_is_taken_in(folder: Path, engine: Engine) -> None:
    session = await ModelProposer(engine).open(SessionRequest(PLAIN, 1, 20, 40))
    first, *_ = await propose(session, 0, 0, PROMPT, gamma=6)
    assert await propose(session, 1, 21, [5, 6], gamma=0) == []
    (draft,) = await propose(session, 2, 23, [7], gamma=1)
    check_follows(draft, folder, [*PROMPT, first.token, 5, 6, 7])


async def test_one_that_is_given_up_before_its_turn_is_taken_in(folder: Path, engine: Engine) -> None:
    session = await ModelProposer(engine).open(SessionRequest(PLAIN, 1, 20, 40))
    first, *_ = await propose(session, 0, 0, PROMPT, gamma=6)
    hold, holding = await held(await engine.open(1))
    overtaken = asyncio.create_task(propose(session, 1, 21, [5, 6], gamma=4))
    while engine.queue < 2:
        await asyncio.sleep(0)
    overtaken.cancel()
    following = asyncio.create_task(propose(session, 2, 23, [7], gamma=1))
    while engine.queue < 3:
        await asyncio.sleep(0)
    hold.release()
    await holding
    (draft,) = await following
    check_follows(draft, folder, [*PROMPT, first.token, 5, 6, 7])


async def test_one_for_no_drafts_that_starts_past_the_end_changes_nothing(engine: Engine) -> None:
    session = await ModelProposer(engine).open(SessionRequest(PLAIN, 1, 20, 40))
    await propose(session, 0, 0, PROMPT, gamma=1)
    assert await propose(session, 1, 30, [5], gamma=0) == []
    with pytest.raises(UnknownPrefixError) as caught:
        await propose(session, 2, 31, [6], gamma=1)
    assert caught.value.known_length == 21
