"""A trained draft that sees tokens alone: q is what training made it, over the ids of its head."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.draft_loading import load_draft
from services.common.engine.model import LoadOptions
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, SamplingParams
from services.distill.unrolled import unroll
from services.draft_worker.config import DraftSettings
from services.draft_worker.model_proposer import ModelProposer
from services.draft_worker.models import features_of, proposer_of
from services.draft_worker.proposer import ProposalRequest, Proposer, ProposeSession, SessionRequest
from tests.support.drafts import Trained, make_tiny_draft
from tests.support.engines import StartEngine, random_tokens
from tests.support.models import ARCHITECTURES, VOCAB, make_tiny, make_tiny_llama

SEED = 5
TEXT = random_tokens(random.Random(1), 21)


async def serve(folder: Path, start_engine: StartEngine, top_k: int = 0) -> Proposer:
    loaded = load_draft(LoadOptions(str(folder), dtype="float32", device="cpu", threads=1))
    assert features_of(loaded) is None
    settings = DraftSettings(drafter="model", model=str(folder), draft_top_k=top_k)
    proposer = proposer_of(settings, loaded, await start_engine(loaded))
    assert isinstance(proposer, ModelProposer)
    return proposer


async def propose(session: ProposeSession, round_index: int, base: int, tokens: list[int]) -> list[Draft]:
    request = ProposalRequest(round_index, base, tokens, 4)
    return [draft async for drafts in session.propose(request) for draft in drafts]


def law(trained: Trained, text: list[int]) -> np.ndarray:
    """Return q after a text, over the whole vocabulary: float64[vocab]."""
    with torch.inference_mode():
        ((_, states),) = unroll(trained.model, torch.tensor([text]), None, 1)
        q = torch.softmax(states[0, -1] @ trained.model.head.T, dim=-1)
    whole = np.zeros(VOCAB)
    whole[trained.head_ids] = q.numpy()
    return whole


@pytest.mark.parametrize("architecture", ["llama", "qwen2 with biases", "gpt2 with learned positions"])
async def test_what_is_served_is_what_was_trained(architecture: str, tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny(tmp_path / "target", ARCHITECTURES[architecture]())
    folder = make_tiny_draft(tmp_path / "draft", target, layers=(1, 0), feature_layers=())
    trained = Trained(folder, target)
    session = await (await serve(folder, start_engine)).open(SessionRequest(SamplingParams(), SEED, len(TEXT), 40))
    text, base, new = list(TEXT), 0, TEXT
    for index, kept in enumerate((2, 0, 4, 1)):
        drafts = await propose(session, index, base, new)
        assert len(drafts) == 4
        for offset, draft in enumerate(drafts):
            before = [*text, *(earlier.token for earlier in drafts[:offset])]
            np.testing.assert_allclose(draft.q.dense(VOCAB), law(trained, before), rtol=2e-3, atol=1e-5)
            assert draft.token == sample(draft.q, uniform(SEED, index, offset, Purpose.DRAFT))
        # Some were kept, then a token that the head cannot propose.
        text += [draft.token for draft in drafts[:kept]]
        base, new = len(text), [8]
        text += new
    session.close()


async def test_the_ids_of_a_truncated_q_are_the_targets(tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny_llama(tmp_path / "target")
    folder = make_tiny_draft(tmp_path / "draft", target, feature_layers=())
    session = await (await serve(folder, start_engine, 3)).open(SessionRequest(SamplingParams(), SEED, len(TEXT), 40))
    (first, *_) = await propose(session, 0, 0, TEXT)
    whole = law(Trained(folder, target), TEXT)
    assert first.q.ids is not None
    assert first.q.ids.tolist() == sorted(np.argsort(-whole)[:3].tolist())


async def test_it_looks_back_no_further_than_its_window(tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny_llama(tmp_path / "target")
    folder = make_tiny_draft(tmp_path / "draft", target, feature_layers=(), window=8)
    proposer = await serve(folder, start_engine)

    async def q(text: list[int]) -> np.ndarray:
        session = await proposer.open(SessionRequest(SamplingParams(), SEED, len(text), 40))
        first, *_ = await propose(session, 0, 0, text)
        session.close()
        return first.q.dense(VOCAB)

    before = await q(TEXT)
    far, near = list(TEXT), list(TEXT)
    far[-9], near[-8] = (TEXT[-9] + 1) % VOCAB, (TEXT[-8] + 1) % VOCAB
    assert np.array_equal(await q(far), before)
    assert not np.allclose(await q(near), before, rtol=1e-3)
