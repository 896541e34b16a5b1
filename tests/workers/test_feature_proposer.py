"""A draft that is fed with the target's hidden states: served as it was trained, and silent where it lacks them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.draft_loading import load_draft
from services.common.engine.model import LoadOptions
from services.common.engine.scheduler import PassLimits
from services.common.specdec.errors import InvalidFieldError, StartupError, UnknownPrefixError
from services.common.specdec.types import Draft, SamplingParams
from services.draft_worker.config import DraftSettings
from services.draft_worker.feature_proposer import FeatureProposer
from services.draft_worker.models import proposer_of
from services.draft_worker.proposer import Features, ProposalRequest, ProposeSession, SessionRequest
from tests.support.drafts import Trained, feature_bytes, make_tiny_draft
from tests.support.engines import StartEngine, random_tokens
from tests.support.models import ARCHITECTURES, make_tiny, make_tiny_llama

PLAIN = SamplingParams()


async def serve(folder: Path, start_engine: StartEngine, chunk: int = 8) -> FeatureProposer:
    loaded = load_draft(LoadOptions(str(folder), dtype="float32", device="cpu", threads=1))
    engine = await start_engine(loaded, passes=PassLimits(prefill_chunk=chunk))
    proposer = proposer_of(DraftSettings(drafter="model", model=str(folder), draft_top_k=0), loaded, engine)
    assert isinstance(proposer, FeatureProposer)
    return proposer


async def propose(
    session: ProposeSession,
    round_index: int,
    base_length: int,
    tokens: list[int],
    gamma: int,
    features: Features | None = None,
) -> list[Draft]:
    request = ProposalRequest(round_index, base_length, tokens, gamma, features)
    return [draft async for drafts in session.propose(request) for draft in drafts]


def told(trained: Trained, text: list[int], start: int, end: int) -> Features:
    return Features(start, feature_bytes(trained.features(text)[start:end]))


def check(trained: Trained, text: list[int], drafts: list[Draft], skipped: int = 0) -> None:
    """Compare each q with training's, of the text from `skipped` on."""
    whole = [*text, *(draft.token for draft in drafts)][skipped:]
    expected = trained.q(whole, len(text) - skipped, len(drafts))
    for draft, q in zip(drafts, expected, strict=True):
        ids = trained.head_ids if draft.q.ids is None else draft.q.ids.tolist()
        at = [trained.head_ids.index(i) for i in ids]
        np.testing.assert_allclose(draft.q.weights, q[at].numpy(), rtol=2e-3, atol=1e-5)
        assert draft.q.total == pytest.approx(1, abs=1e-4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("drafts") / "draft", target)


@pytest.mark.parametrize("layers", [(0,), (0, 1)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2 with biases", "gpt2 with learned positions"])
async def test_what_is_served_is_what_was_trained(
    architecture: str, layers: tuple[int, ...], tmp_path: Path, start_engine: StartEngine
) -> None:
    target = make_tiny(tmp_path / "target", ARCHITECTURES[architecture]())
    folder = make_tiny_draft(tmp_path / "draft", target, layers=layers)
    trained, proposer = Trained(folder, target), await serve(folder, start_engine)
    text = random_tokens(random.Random(1), 21)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    drafts = await propose(session, 0, 0, text, 4, told(trained, text, 0, 20))
    assert len(drafts) == 4
    check(trained, text, drafts)
    for index, kept in enumerate((2, 0, 4, 1), 1):
        n = len(text)
        text = [*text, *(draft.token for draft in drafts[:kept]), 9]
        drafts = await propose(session, index, n + kept, [9], 4, told(trained, text, n - 1, n + kept))
        assert len(drafts) == 4
        check(trained, text, drafts)
    session.close()


async def test_a_repeated_request_has_the_same_answer(target: Path, draft: Path, start_engine: StartEngine) -> None:
    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    text = random_tokens(random.Random(2), 15)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    first = await propose(session, 0, 0, text, 3, told(trained, text, 0, 14))
    again = await propose(session, 0, 15, [], 3)
    whole = await propose(session, 0, 0, text, 3, told(trained, text, 0, 14))
    for other in (again, whole):
        assert [draft.token for draft in other] == [draft.token for draft in first]
        check(trained, text, other)


async def test_sessions_that_share_passes_do_not_mix(target: Path, draft: Path, start_engine: StartEngine) -> None:
    import asyncio

    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    source = random.Random(3)
    texts = [random_tokens(source, length) for length in (9, 30, 17)]

    async def one(text: list[int]) -> None:
        session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
        check(trained, text, await propose(session, 0, 0, text, 4, told(trained, text, 0, len(text) - 1)))
        session.close()

    await asyncio.gather(*map(one, texts))


async def test_without_features_nothing_is_proposed_and_they_may_come_later(
    target: Path, draft: Path, start_engine: StartEngine
) -> None:
    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    text = random_tokens(random.Random(4), 12)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    assert await propose(session, 0, 0, text, 4) == []
    text = [*text, 7]
    # Overtaken: the features are taken in all the same.
    assert await propose(session, 1, 12, [7], 0, told(trained, text, 0, 12)) == []
    drafts = await propose(session, 2, 13, [], 4)
    check(trained, text, drafts)
    # A token that is no draft of its own, without what the target made of the one before: a gap.
    assert await propose(session, 3, 13, [8, 9], 4) == []
    text = [*text, 8, 9]
    drafts = await propose(session, 4, 15, [], 4, told(trained, text, 12, 14))
    check(trained, text, drafts)


async def test_its_own_drafts_are_gone_on_from_without_features(
    target: Path, draft: Path, start_engine: StartEngine
) -> None:
    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    text = random_tokens(random.Random(5), 12)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    drafts = await propose(session, 0, 0, text, 2, told(trained, text, 0, 11))
    # As drafting that runs ahead does: from what is not committed yet.
    drafts += await propose(session, 1, 14, [], 2)
    assert len(drafts) == 4
    check(trained, text, drafts)


async def test_a_long_prompt_begins_at_its_window(target: Path, draft: Path, start_engine: StartEngine) -> None:
    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    text = random_tokens(random.Random(6), 100)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    drafts = await propose(session, 0, 0, text, 3, told(trained, text, 60, 99))
    # Positions count from the beginning of the window; the target's states there are those of the whole text.
    features = trained.features(text)
    trained.features = lambda tokens: torch.cat([features[60:], features[-3:]])[: len(tokens)]  # type: ignore[method-assign]
    check(trained, text, drafts, skipped=60)


async def test_no_row_looks_back_further_than_the_window(
    target: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    folder = make_tiny_draft(tmp_path / "draft", target, window=8)
    trained, proposer = Trained(folder, target), await serve(folder, start_engine)
    text = random_tokens(random.Random(7), 30)
    features = trained.features(text)

    async def q(change: Callable[[torch.Tensor], None]) -> np.ndarray:
        changed = features.clone()
        change(changed)
        session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
        (only,) = await propose(session, 0, 0, text, 1, Features(0, feature_bytes(changed[:29])))
        session.close()
        return only.q.weights

    def far(states: torch.Tensor) -> None:
        states[20] += 1

    def near(states: torch.Tensor) -> None:
        states[21] += 1

    # The last row is position 29: eight positions are 22 to 29, and the state before 22 is the one after 21.
    before = await q(lambda _: None)
    assert np.array_equal(await q(far), before)
    assert not np.allclose(await q(near), before, rtol=1e-3)


async def test_a_lost_text_is_told_and_a_new_window_begun(target: Path, draft: Path, start_engine: StartEngine) -> None:
    trained, proposer = Trained(draft, target), await serve(draft, start_engine)
    text = random_tokens(random.Random(8), 20)
    session = await proposer.open(SessionRequest(PLAIN, 5, len(text), 40))
    with pytest.raises(UnknownPrefixError) as unknown:
        await propose(session, 0, 19, text[19:], 2)
    assert unknown.value.known_length == 0
    drafts = await propose(session, 1, 0, text, 2, told(trained, text, 0, 19))
    drafts = await propose(session, 2, 0, text, 3, told(trained, text, 0, 19))
    check(trained, text, drafts)
    # A cut far back, then all of it again.
    assert await propose(session, 3, 0, text[:3], 3) == []
    drafts = await propose(session, 4, 3, text[3:], 3, told(trained, text, 0, 19))
    check(trained, text, drafts)


@pytest.mark.parametrize(
    ("start", "data", "field"),
    [
        (0, b"", "features.data"),
        (0, bytes(100), "features.data"),
        (0, bytes(128 * 2**16 + 128), "features.data"),
        (9, bytes(128), "features"),
        (2**31, bytes(128), "features"),
    ],
)
async def test_features_that_cannot_be_are_refused_by_name(
    start: int, data: bytes, field: str, draft: Path, start_engine: StartEngine
) -> None:
    proposer = await serve(draft, start_engine)
    session = await proposer.open(SessionRequest(PLAIN, 5, 10, 40))
    with pytest.raises(InvalidFieldError, match=field):
        await propose(session, 0, 0, list(range(10)), 2, Features(start, data))
    # Nothing has changed.
    with pytest.raises(UnknownPrefixError):
        await propose(session, 1, 10, [1], 2)


async def test_a_text_longer_than_was_reserved_is_refused(draft: Path, start_engine: StartEngine) -> None:
    """It is kept as long as the stream is open: a peer could fill the memory with it."""
    session = await (await serve(draft, start_engine)).open(SessionRequest(PLAIN, 5, 20, 10))
    assert await propose(session, 0, 0, [1] * 30, 0) == []
    with pytest.raises(InvalidFieldError, match="base_length \\+ tokens is 31: must be at most 30"):
        await propose(session, 1, 30, [1], 0)


async def in_pool(tokens: int, folder: Path, start_engine: StartEngine) -> FeatureProposer:
    """Serve a draft from a pool of so many tokens."""
    # A token takes 2 x 2 x 8 numbers of keys and values, and 32 of its state.
    memory = str(tokens * 256)
    settings = DraftSettings(drafter="model", model=str(folder), kv_cache_memory=memory, draft_top_k=0)
    loaded = load_draft(LoadOptions(str(folder), dtype="float32", device="cpu", threads=1))
    proposer = proposer_of(settings, loaded, await start_engine(loaded, kv_cache_memory=memory))
    assert isinstance(proposer, FeatureProposer)
    return proposer


async def test_a_pool_smaller_than_the_window_is_refused_at_start(
    target: Path, tmp_path: Path, start_engine: StartEngine
) -> None:
    """Its sessions could not take the window's states in, and would be lost in every round."""
    folder = make_tiny_draft(tmp_path / "draft", target, window=100)
    with pytest.raises(StartupError, match="holds 355 tokens, must hold at least 356 for a draft that looks back on 1"):
        await in_pool(355, folder, start_engine)
    assert await in_pool(356, folder, start_engine)


async def test_a_text_that_outgrows_the_pool_is_told_of_once_and_counted(
    target: Path, tmp_path: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_draft(tmp_path / "draft", target, window=100)
    proposer = await in_pool(356, folder, start_engine)
    trained, text = Trained(folder, target), random_tokens(random.Random(9), 660)
    for sessions in (1, 2):
        session = await proposer.open(SessionRequest(PLAIN, 5, 400, 300))
        # The window of a long prompt, then as many tokens of an answer as a session has room for at least.
        assert len(await propose(session, 0, 0, text[:400], 4, told(trained, text[:400], 300, 399))) == 4
        assert len(await propose(session, 1, 400, text[400:650], 4, told(trained, text[:650], 399, 649))) == 4
        assert proposer.outgrown.sessions == sessions - 1
        for index in (2, 3):
            assert await propose(session, index, 650, text[650:], 4, told(trained, text, 649, 659)) == []
        assert proposer.outgrown.sessions == sessions
        session.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "services.draft_worker.outgrown"]
    assert "filled its 355 tokens of the KV pool, its text has 660" in warning
    assert "--kv-cache-memory" in warning
