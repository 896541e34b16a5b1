"""The target's sessions: answers, counts, limits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.executor import PassExecutor
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.processors import distributions
from services.common.engine.session import SessionClosedError
from services.common.specdec.errors import CapacityError, InvalidFieldError, UnknownPrefixError
from services.common.specdec.types import SamplingParams
from services.target_worker.verifier import Verifier
from tests.support.models import VOCAB, make_tiny_llama

PLAIN = SamplingParams()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "target", context=100)
    return load_model(LoadOptions(str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def verifier(loaded: LoadedModel, executor: PassExecutor) -> Verifier:
    return Verifier(loaded, executor, max_sessions=2, prefill_chunk=16)


def law(loaded: LoadedModel, text: list[int], rows: int, params: SamplingParams) -> list[np.ndarray]:
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([text]), use_cache=False).logits[0, -rows:]
        return [row.dense(VOCAB) for row in distributions(logits, params)]


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.7, 20, 0.9, 0.01)])
async def test_rows_are_the_law_after_each_of_the_last_tokens(
    loaded: LoadedModel, verifier: Verifier, params: SamplingParams
) -> None:
    session = await verifier.open(params, prompt_length=20, max_new_tokens=30)
    prompt = list(range(2, 22))
    answer = await session.verify(0, [*prompt, 30, 31], rows=3)
    for row, expected in zip(answer.rows, law(loaded, [*prompt, 30, 31], 3, params), strict=True):
        np.testing.assert_allclose(row.dense(VOCAB), expected, atol=1e-5)
    # 30 was kept, 31 rejected and replaced by 40.
    answer = await session.verify(21, [40, 41, 42], rows=3)
    for row, expected in zip(answer.rows, law(loaded, [*prompt, 30, 40, 41, 42], 3, params), strict=True):
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


async def test_a_text_that_does_not_fit_in_the_context(verifier: Verifier) -> None:
    with pytest.raises(InvalidFieldError, match=r"prompt_length \+ max_new_tokens is 101: must be at most 100"):
        await verifier.open(PLAIN, 90, 11)
    assert verifier.sessions_open == 0
    await verifier.open(PLAIN, 90, 10)


async def test_sessions_are_limited_and_freed(verifier: Verifier) -> None:
    first, _ = await verifier.open(PLAIN, 1, 1), await verifier.open(PLAIN, 1, 1)
    with pytest.raises(CapacityError, match="all 2 sessions"):
        await verifier.open(PLAIN, 1, 1)
    first.close()
    first.close()
    assert verifier.sessions_open == 1
    await verifier.open(PLAIN, 1, 1)


async def test_a_closed_session_leaves_the_queue(verifier: Verifier, executor: PassExecutor) -> None:
    release = threading.Event()
    busy = asyncio.create_task(executor.run(release.wait))
    session = await verifier.open(PLAIN, 10, 5)
    waiting = asyncio.create_task(session.verify(0, [1, 2], 1))
    await asyncio.sleep(0)
    session.close()
    release.set()
    await busy
    with pytest.raises(SessionClosedError):
        await waiting


async def test_nan_weights_come_out_as_bad_rows(tmp_path: Path, executor: PassExecutor) -> None:
    broken = load_model(LoadOptions(str(make_tiny_llama(tmp_path / "nan")), dtype="float32", device="cpu"))
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    for params in (SamplingParams(0.0), PLAIN):
        answer = await (await Verifier(broken, executor, max_sessions=1).open(params, 10, 5)).verify(0, [1, 2], 2)
        assert all(np.isnan(row.weights).any() for row in answer.rows)


async def test_warm_up_leaves_no_session_open(verifier: Verifier) -> None:
    await verifier.warm_up()
    assert verifier.sessions_open == 0
