"""Crop and extend equals recompute; nothing is fed twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from services.common.engine.executor import PassExecutor
from services.common.engine.kv_cache import KvCache
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.session import ModelSession, SessionClosedError, warm_up
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from tests.support.models import VOCAB, make_tiny_gpt2, make_tiny_llama, make_tiny_mistral

MAKERS = {"llama": make_tiny_llama, "gpt2": make_tiny_gpt2, "mistral": make_tiny_mistral}


@pytest.fixture(params=MAKERS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
    folder = MAKERS[request.param](tmp_path / request.param)
    return load_model(LoadOptions(str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def llama(tmp_path: Path) -> LoadedModel:
    return load_model(LoadOptions(str(make_tiny_llama(tmp_path / "llama")), dtype="float32", device="cpu"))


def recomputed(loaded: LoadedModel, tokens: list[int], rows: int) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(torch.tensor([tokens]), use_cache=False).logits[0, -rows:]
    return logits


def identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("prefill_chunk", [4, 512])
async def test_a_random_walk_equals_recompute(loaded: LoadedModel, executor: PassExecutor, prefill_chunk: int) -> None:
    source = random.Random(prefill_chunk)
    session = ModelSession(loaded, executor, capacity=200, prefill_chunk=prefill_chunk)
    text = random_tokens(source, 30)
    await session.evaluate(0, text, 1, identity)
    for _ in range(40):
        keep = source.randrange(max(0, len(text) - 12), len(text) + 1)
        new = random_tokens(source, source.randrange(1, 10))
        rows = source.randrange(1, len(new) + 1)
        text = text[:keep] + new
        logits, timing = await session.evaluate(keep, new, rows, identity)
        torch.testing.assert_close(logits, recomputed(loaded, text, rows), rtol=1e-4, atol=1e-4)
        assert timing.forward_tokens == len(new), "only the new tokens are fed"
        assert session.sequence.tokens == text


async def test_chunked_prefill_equals_one_pass(loaded: LoadedModel, executor: PassExecutor) -> None:
    prompt = random_tokens(random.Random(1), 100)
    for chunk in (1, 7, 33, 99, 100):
        session = ModelSession(loaded, executor, capacity=100, prefill_chunk=chunk)
        logits, timing = await session.evaluate(0, prompt, 5, identity)
        torch.testing.assert_close(logits, recomputed(loaded, prompt, 5), rtol=1e-4, atol=1e-4)
        assert timing.forward_tokens == session.forward_tokens == 100


async def test_other_sessions_get_in_between_chunks(llama: LoadedModel, executor: PassExecutor) -> None:
    order: list[str] = []
    long = ModelSession(llama, executor, capacity=100, prefill_chunk=10)
    short = ModelSession(llama, executor, capacity=100, prefill_chunk=10)
    await asyncio.gather(
        long.evaluate(0, [5] * 100, 1, lambda _: order.append("long")),
        short.evaluate(0, [5], 1, lambda _: order.append("short")),
    )
    assert order == ["short", "long"]


async def test_a_repeated_request_has_the_same_answer(loaded: LoadedModel, executor: PassExecutor) -> None:
    session = ModelSession(loaded, executor, capacity=50, prefill_chunk=512)
    await session.evaluate(0, [3, 4, 5, 6], 1, identity)
    first, _ = await session.evaluate(4, [7, 8, 9], 3, identity)
    again, timing = await session.evaluate(4, [7, 8, 9], 3, identity)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert timing.forward_tokens == 3


async def test_an_unknown_prefix_changes_nothing(llama: LoadedModel, executor: PassExecutor) -> None:
    session = ModelSession(llama, executor, capacity=50, prefill_chunk=512)
    await session.evaluate(0, [3, 4, 5], 1, identity)
    with pytest.raises(UnknownPrefixError) as caught:
        await session.evaluate(4, [9], 1, identity)
    assert caught.value.known_length == 3
    assert session.sequence.tokens == [3, 4, 5]
    logits, timing = await session.evaluate(3, [6], 1, identity)
    torch.testing.assert_close(logits, recomputed(llama, [3, 4, 5, 6], 1), rtol=1e-4, atol=1e-4)
    assert timing.forward_tokens == 1


@pytest.mark.parametrize(
    ("base_length", "tokens", "message"),
    [
        (2, [1, VOCAB], rf"tokens\[1\] is {VOCAB}: must be 0 to {VOCAB - 1}"),
        (2, [-1], r"tokens\[0\] is -1"),
        (2, [1] * 9, r"base_length \+ tokens is 11: must be at most 10"),
    ],
)
async def test_bad_requests_change_nothing(
    llama: LoadedModel, executor: PassExecutor, base_length: int, tokens: list[int], message: str
) -> None:
    session = ModelSession(llama, executor, capacity=10, prefill_chunk=512)
    await session.evaluate(0, [3, 4], 1, identity)
    with pytest.raises(InvalidFieldError, match=message):
        await session.evaluate(base_length, tokens, 1, identity)
    assert session.sequence.tokens == [3, 4]
    assert session.forward_tokens == 2


async def test_a_pass_that_fails_half_way_leaves_a_cache_that_works(
    loaded: LoadedModel, executor: PassExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ModelSession(loaded, executor, capacity=50, prefill_chunk=512)
    await session.evaluate(0, [3, 4, 5], 1, identity)
    with monkeypatch.context() as patch:
        update = KvCache.update

        def fail_in_the_second_layer(self: KvCache, keys: torch.Tensor, values: torch.Tensor, layer: int, **_: object):
            if layer == 1:
                raise MemoryError
            return update(self, keys, values, layer)

        patch.setattr(KvCache, "update", fail_in_the_second_layer)
        with pytest.raises(MemoryError):
            await session.evaluate(3, [6, 7], 1, identity)
    logits, _ = await session.evaluate(3, [6, 7], 2, identity)
    torch.testing.assert_close(logits, recomputed(loaded, [3, 4, 5, 6, 7], 2), rtol=1e-4, atol=1e-4)


async def test_a_request_that_is_cancelled_in_the_queue_never_runs(llama: LoadedModel, executor: PassExecutor) -> None:
    session = ModelSession(llama, executor, capacity=50, prefill_chunk=512)
    release, blocker = block(executor)
    waiting = asyncio.create_task(session.evaluate(0, [3, 4], 1, identity))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release()
    await blocker
    await executor.run(lambda: None)
    assert session.sequence.tokens == []
    assert session.forward_tokens == 0


async def test_a_request_whose_session_is_closed_in_the_queue_never_runs(
    llama: LoadedModel, executor: PassExecutor
) -> None:
    session = ModelSession(llama, executor, capacity=50, prefill_chunk=512)
    release, blocker = block(executor)
    waiting = asyncio.create_task(session.evaluate(0, [3, 4], 1, identity))
    await asyncio.sleep(0)
    session.close()
    release()
    await blocker
    with pytest.raises(SessionClosedError):
        await waiting
    assert session.forward_tokens == 0


def block(executor: PassExecutor) -> tuple[Callable[[], None], asyncio.Task[object]]:
    """Occupy the executor until the returned function is called."""
    event = threading.Event()
    return event.set, asyncio.ensure_future(executor.run(event.wait))


def test_the_cache_is_written_in_place(llama: LoadedModel) -> None:
    cache = KvCache(llama.config, capacity=20)
    with torch.inference_mode():
        llama.model(torch.tensor([[3, 4, 5]]), cache=cache)
        where = cache.layers[0].keys.data_ptr()
        llama.model(torch.tensor([[6]]), cache=cache)
        assert cache.layers[0].keys.data_ptr() == where
        assert cache.get_seq_length() == 4
        cache.crop_to(2)
        assert cache.layers[0].keys.shape[2] == 2
        with pytest.raises(RuntimeError):
            llama.model(torch.tensor([[6] * 19]), cache=cache)


async def test_padded_logits_are_trimmed(tmp_path: Path, executor: PassExecutor) -> None:
    folder = make_tiny_llama(tmp_path / "padded", padding=24)
    loaded = load_model(LoadOptions(str(folder), dtype="float32", device="cpu"))
    assert loaded.vocab_size == VOCAB
    session = ModelSession(loaded, executor, capacity=10, prefill_chunk=512)
    logits, _ = await session.evaluate(0, [3, 4], 2, identity)
    assert logits.shape == (2, VOCAB)
    torch.testing.assert_close(logits, recomputed(loaded, [3, 4], 2)[:, :VOCAB], rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidFieldError, match="ids of the vocabulary"):
        await session.evaluate(2, [VOCAB], 1, identity)


async def test_warm_up_runs(loaded: LoadedModel, executor: PassExecutor) -> None:
    await warm_up(loaded, executor)


def test_greedy_decoding_is_the_same_with_the_librarys_own_cache(loaded: LoadedModel) -> None:
    prompt = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.inference_mode():
        theirs, ours = (
            greedy(loaded, prompt, cache) for cache in (DynamicCache(config=loaded.config), KvCache(loaded.config, 60))
        )
    assert theirs == ours


def greedy(loaded: LoadedModel, prompt: torch.Tensor, cache: object) -> list[int]:
    fed, found = prompt, []
    for _ in range(40):
        fed = loaded.model(fed, cache=cache).logits[:, -1:].argmax(-1)
        found.append(int(fed))
    return found
