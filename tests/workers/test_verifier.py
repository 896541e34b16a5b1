"""The target's sessions: answers, counts, limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.admission import AdmissionLimits
from services.common.engine.engine import Engine
from services.common.engine.prefixes import BLOCK
from services.common.engine.processors import distributions
from services.common.engine.scheduler import PassLimits
from services.common.engine.work import SessionClosedError
from services.common.specdec.errors import CapacityError, InvalidFieldError, UnknownPrefixError
from services.common.specdec.types import SamplingParams
from services.target_worker.verifier import Verifier
from tests.support.engines import Library, StartEngine, held, load
from tests.support.models import VOCAB, make_tiny_llama

PLAIN = SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "target", context=100)


@pytest.fixture(scope="module")
def library(folder: Path) -> Library:
    return Library(folder)


@pytest.fixture
async def engine(folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(folder, passes=PassLimits(prefill_chunk=16), admission=AdmissionLimits(3, 0))


@pytest.fixture
def verifier(engine: Engine) -> Verifier:
    return Verifier(engine)


def law(library: Library, text: list[int], rows: int, params: SamplingParams) -> list[np.ndarray]:
    return [row.dense(VOCAB) for row in distributions(library.logits(text, rows), params)]


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.7, 20, 0.9, 0.01)])
async def test_rows_are_the_law_after_each_of_the_last_tokens(
    library: Library, verifier: Verifier, params: SamplingParams
) -> None:
    session = await verifier.open(params, prompt_length=20, max_new_tokens=30)
    prompt = list(range(2, 22))
    answer = await session.verify(0, [*prompt, 30, 31], rows=3)
    for row, expected in zip(answer.rows, law(library, [*prompt, 30, 31], 3, params), strict=True):
        np.testing.assert_allclose(row.dense(VOCAB), expected, atol=1e-5)
    # 30 was kept, 31 rejected and replaced by 40.
    answer = await session.verify(21, [40, 41, 42], rows=3)
    for row, expected in zip(answer.rows, law(library, [*prompt, 30, 40, 41, 42], 3, params), strict=True):
        np.testing.assert_allclose(row.dense(VOCAB), expected, atol=1e-5)


async def test_the_prompt_is_fed_once_and_then_what_each_round_adds(verifier: Verifier) -> None:
    session = await verifier.open(PLAIN, prompt_length=40, max_new_tokens=50)
    first = await session.verify(0, [5] * 40 + [6, 7, 8], rows=4)
    assert first.timing.forward_tokens == 43
    rounds = [
        (43, [9, 10, 11, 12], 4),  # every draft was kept: the bonus token and three new drafts
        (44, [20, 21, 22, 23], 4),  # one draft kept, then the residual
        (44, [30], 1),  # none kept, no drafts this time
        (45, [31, 32], 2),
    ]
    for base_length, tokens, rows in rounds:
        answer = await session.verify(base_length, tokens, rows)
        assert answer.timing.forward_tokens == len(tokens)
        assert len(answer.rows) == rows


async def test_a_repeated_round_has_the_same_answer(verifier: Verifier) -> None:
    session = await verifier.open(PLAIN, 10, 20)
    await session.verify(0, list(range(2, 12)), 1)
    answers = [await session.verify(10, [3, 4], rows=2) for _ in range(3)]
    # On another session, from the start: as after the loss of a worker.
    fresh = await (await verifier.open(PLAIN, 10, 20)).verify(0, [*range(2, 12), 3, 4], rows=2)
    for answer in answers:
        for row, first, elsewhere in zip(answer.rows, answers[0].rows, fresh.rows, strict=True):
            np.testing.assert_array_equal(row.weights, first.weights)
            np.testing.assert_allclose(row.weights, elsewhere.weights, atol=1e-6)


async def test_an_unknown_prefix_says_what_is_known(verifier: Verifier) -> None:
    session = await verifier.open(PLAIN, 10, 20)
    with pytest.raises(UnknownPrefixError) as caught:
        await session.verify(5, [1], 1)
    assert caught.value.known_length == 0
    await session.verify(0, [1] * 10, 1)
    with pytest.raises(UnknownPrefixError) as caught:
        await session.verify(11, [1], 1)
    assert caught.value.known_length == 10
    assert (await session.verify(10, [1], 1)).timing.forward_tokens == 1


async def test_bad_requests(verifier: Verifier) -> None:
    session = await verifier.open(PLAIN, 10, 5)
    for tokens, rows, message in (
        ([1, 2], 0, "rows is 0: must be 1 to 2"),
        ([1, 2], 3, "rows is 3: must be 1 to 2"),
        ([], 1, "rows is 1: must be 1 to 0"),
        ([1, VOCAB], 1, r"tokens\[1\] is 320: must be 0 to 319"),
        ([1] * 16, 1, r"base_length \+ tokens is 16: must be at most 15"),
    ):
        with pytest.raises(InvalidFieldError, match=message):
            await session.verify(0, tokens, rows)
    assert (await session.verify(0, [1] * 15, 1)).timing.forward_tokens == 15


async def test_a_text_that_does_not_fit_in_the_context(verifier: Verifier, engine: Engine) -> None:
    with pytest.raises(InvalidFieldError, match=r"max_new_tokens is 101: must be 1 to 100, the target's context"):
        await verifier.open(PLAIN, 90, 11)
    with pytest.raises(InvalidFieldError, match="is 0: must be 1 to 100"):
        await verifier.open(PLAIN, 0, 0)
    assert engine.memory.sessions == 0
    await verifier.open(PLAIN, 90, 10)


async def test_sessions_are_limited_and_freed(verifier: Verifier, engine: Engine) -> None:
    first, *_ = [await verifier.open(PLAIN, 1, 1) for _ in range(3)]
    with pytest.raises(CapacityError, match=r"3 of 3 sessions \(--max-sessions\)"):
        await verifier.open(PLAIN, 1, 1)
    first.close()
    first.close()
    assert engine.memory.sessions == 2
    await verifier.open(PLAIN, 1, 1)


async def test_a_closed_session_leaves_the_queue(verifier: Verifier, engine: Engine) -> None:
    hold, holding = await held(await engine.open(1))
    session = await verifier.open(PLAIN, 10, 5)
    waiting = asyncio.create_task(session.verify(0, [1, 2], 1))
    await asyncio.sleep(0)
    session.close()
    hold.release()
    await holding
    with pytest.raises(SessionClosedError):
        await waiting
    with pytest.raises(SessionClosedError):
        await session.verify(0, [1, 2], 1)


async def test_nan_weights_come_out_as_bad_rows(folder: Path, start_engine: StartEngine) -> None:
    broken = load(folder)
    engine = await start_engine(broken)
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    for params in (SamplingParams(0.0), PLAIN):
        session = await Verifier(engine).open(params, 10, 5)
        answer = await session.verify(0, [1, 2], 2)
        assert all(np.isnan(row.weights).any() for row in answer.rows)


async def test_the_timing_says_who_shared_the_pass_and_what_was_reused(verifier: Verifier, engine: Engine) -> None:
    hold, holding = await held(await engine.open(1))
    prompt = list(range(2, 52))
    sessions = [await verifier.open(PLAIN, 60, 0) for _ in range(2)]
    asked = [asyncio.create_task(sessions[i].verify(0, [*prompt, i, i], 2)) for i in range(2)]
    await asyncio.sleep(0)
    hold.release()
    await holding
    first, second = [answer.timing for answer in await asyncio.gather(*asked)]
    assert (first.forward_tokens, first.reused_tokens) == (52, 0)
    # It waits for the first one's chunks as long as there is a block to be gained by it.
    assert 50 - BLOCK < second.reused_tokens <= 50
    assert second.forward_tokens == 52 - second.reused_tokens
    alone = (await sessions[0].verify(52, [7], 1)).timing
    assert alone.batch_size == 1
    assert alone.queue_s >= 0
    assert alone.forward_s > 0
