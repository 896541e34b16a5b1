"""One session: crop and extend equals recompute, nothing is fed twice, and bad requests change nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.kv_pool import KvPool
from services.common.engine.scheduler import PassLimits
from services.common.engine.session import ModelSession
from services.common.engine.work import SessionClosedError
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from tests.support.engines import (
    Library,
    StartEngine,
    assert_close,
    evaluate,
    held,
    identity,
    random_tokens,
    recorded_passes,
)
from tests.support.models import ARCHITECTURES, VOCAB, make_tiny, make_tiny_llama


def tokens_of(session: ModelSession) -> list[int]:
    assert session.lease is not None
    return list(session.lease.tokens)


@pytest.mark.parametrize("prefill_chunk", [4, 512])
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_a_random_walk_equals_recompute(
    start_engine: StartEngine, tmp_path: Path, name: str, prefill_chunk: int
) -> None:
    folder = make_tiny(tmp_path / "model", ARCHITECTURES[name]())
    engine, library = await start_engine(folder, passes=PassLimits(prefill_chunk)), Library(folder)
    source = random.Random(prefill_chunk)
    # Not at the pool's beginning, where places and positions would be the same numbers.
    await engine.open(13)
    session = await engine.open(200)
    text = random_tokens(source, 30)
    assert_close(await evaluate(session, 0, text), library.logits(text, 1))
    for _ in range(15):
        keep = source.randrange(max(0, len(text) - 12), len(text) + 1)
        new = random_tokens(source, source.choice([1, 1, 2, 3, 5, 6, 9]))
        rows = source.randrange(1, len(new) + 1)
        text = text[:keep] + new
        logits, timing = await session.evaluate(keep, new, rows, identity)
        assert_close(logits, library.logits(text, rows))
        assert timing.forward_tokens == len(new), "only the new tokens are fed"
        assert tokens_of(session) == text


async def test_chunked_prefill_equals_one_pass(llama_folder: Path, library: Library, start_engine: StartEngine) -> None:
    prompt = random_tokens(random.Random(1), 100)
    expected = library.logits(prompt, 5)
    for chunk, passes in ((1, 96), (7, 14), (33, 3), (94, 2), (95, 1), (100, 1)):
        engine = await start_engine(llama_folder, passes=PassLimits(chunk))
        session = await engine.open(100)
        logits, timing = await session.evaluate(0, prompt, 5, identity)
        assert_close(logits, expected)
        assert timing.forward_tokens == engine.counters.positions == 100
        # The five whose logits are wanted share a pass with the last of the others.
        assert engine.counters.passes in (passes, passes - 1)


@pytest.fixture
async def engine(llama_folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(llama_folder)


async def test_a_repeated_request_has_the_same_answer(engine: Engine) -> None:
    session = await engine.open(50)
    await evaluate(session, 0, [3, 4, 5, 6])
    first = await evaluate(session, 4, [7, 8, 9], 3)
    again, timing = await session.evaluate(4, [7, 8, 9], 3, identity)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert timing.forward_tokens == 3


async def test_an_unknown_prefix_changes_nothing(engine: Engine) -> None:
    session = await engine.open(50)
    await evaluate(session, 0, [3, 4, 5])
    with pytest.raises(UnknownPrefixError) as caught:
        await evaluate(session, 4, [9])
    assert caught.value.known_length == 3
    assert tokens_of(session) == [3, 4, 5]
    assert (await session.evaluate(3, [9], 1, identity))[1].forward_tokens == 1


@pytest.mark.parametrize(
    ("base_length", "tokens", "message"),
    [
        (2, [1, VOCAB], rf"tokens\[1\] is {VOCAB}: must be 0 to {VOCAB - 1}"),
        (2, [-1], r"tokens\[0\] is -1"),
        (2, [1] * 9, r"base_length \+ tokens is 11: must be at most 10"),
    ],
)
async def test_bad_requests_change_nothing(engine: Engine, base_length: int, tokens: list[int], message: str) -> None:
    session = await engine.open(10)
    await evaluate(session, 0, [3, 4])
    with pytest.raises(InvalidFieldError, match=message):
        await evaluate(session, base_length, tokens)
    assert tokens_of(session) == [3, 4]
    assert engine.counters.positions == 2


async def test_a_pass_that_fails_half_way_leaves_a_cache_that_works(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await engine.open(50)
    await evaluate(session, 0, [3, 4, 5])
    with monkeypatch.context() as patch:
        update = KvPool.update

        def fail_in_the_second_layer(
            self: KvPool, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if layer == 1:
                raise MemoryError
            return update(self, keys, values, layer)

        patch.setattr(KvPool, "update", fail_in_the_second_layer)
        with pytest.raises(MemoryError):
            await evaluate(session, 3, [6, 7])
    assert_close(await evaluate(session, 3, [6, 7], 2), library.logits([3, 4, 5, 6, 7], 2))


async def test_a_request_that_is_cancelled_in_the_queue_never_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, holder = await engine.open(50), await engine.open(1)
    hold, holding = await held(holder)
    passes = recorded_passes(engine, monkeypatch)
    waiting = asyncio.create_task(evaluate(session, 0, [3, 4]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    hold.release()
    await holding
    await evaluate(holder, 0, [5])
    assert [feed.tokens for feeds in passes for feed in feeds] == [[5]]
    assert tokens_of(session) == [3, 4], "whoever asks next goes on from what was asked"


async def test_a_request_whose_session_is_closed_in_the_queue_never_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, holder = await engine.open(50), await engine.open(1)
    hold, holding = await held(holder)
    passes = recorded_passes(engine, monkeypatch)
    waiting = asyncio.create_task(evaluate(session, 0, [3, 4]))
    await asyncio.sleep(0)
    session.close()
    session.close()
    hold.release()
    await holding
    with pytest.raises(SessionClosedError):
        await waiting
    assert passes == []
    assert engine.memory.sessions == 1


async def test_requests_that_wait_when_the_engine_closes_are_told(engine: Engine) -> None:
    session, holder = await engine.open(50), await engine.open(1)
    hold, holding = await held(holder)
    waiting = asyncio.create_task(evaluate(session, 0, [3, 4]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    hold.release()
    await closing
    assert (await holding)[0].shape == (1, VOCAB)
    with pytest.raises(SessionClosedError):
        await waiting
    with pytest.raises(SessionClosedError):
        await evaluate(session, 0, [3, 4])


async def test_the_time_in_the_queue_is_told_from_that_in_passes(engine: Engine) -> None:
    session, holder = await engine.open(50), await engine.open(1)
    hold, holding = await held(holder)
    waiting = asyncio.create_task(session.evaluate(0, [3, 4], 1, identity))
    await asyncio.sleep(0.5)
    hold.release()
    (_, held_timing), (_, timing) = await asyncio.gather(holding, waiting)
    assert timing.queue_s >= 0.04
    assert held_timing.forward_s >= 0.04
    assert held_timing.queue_s < timing.queue_s
    assert (held_timing.batch_size, timing.batch_size) == (1, 1)


async def test_padded_logits_are_trimmed(tmp_path: Path, start_engine: StartEngine) -> None:
    folder = make_tiny_llama(tmp_path / "padded", padding=24)
    engine = await start_engine(folder)
    assert engine.vocab_size == VOCAB
    session = await engine.open(10)
    logits = await evaluate(session, 0, [3, 4], 2)
    assert logits.shape == (2, VOCAB)
    assert_close(logits, Library(folder).logits([3, 4], 2))
    with pytest.raises(InvalidFieldError, match="ids of the vocabulary"):
        await evaluate(session, 2, [VOCAB])


def greedy(count: list[int]) -> Callable[[torch.Tensor], tuple[int, int | None]]:
    """Return a draw of the likeliest token that counts its calls in `count`."""

    def draw(logits: torch.Tensor) -> tuple[int, int | None]:
        count.append(1)
        token = int(logits.argmax())
        return token, token

    return draw


async def test_generating_is_greedy_decoding_with_the_librarys_forward(engine: Engine, library: Library) -> None:
    text = [3, 4, 5, 6, 7, 8, 9]
    calls: list[int] = []
    session = await engine.open(50)
    drawn = [token async for token, _ in session.generate(0, text, 20, greedy(calls))]
    expected = list(text)
    for _ in range(20):
        expected.append(int(library.logits(expected, 1).argmax()))
    assert text + drawn == expected
    assert tokens_of(session) == expected, "the last one too"
    assert len(calls) == 20
    assert engine.counters.positions == len(text) + 19, "which is not fed"


async def test_a_draw_of_nothing_ends_the_generating(engine: Engine) -> None:
    session = await engine.open(50)
    draws: list[tuple[str, int | None]] = [("a", 5), ("b", None), ("c", 6)]
    left = iter(draws)
    assert [item async for item, _ in session.generate(0, [3, 4], 10, lambda _: next(left))] == ["a", "b"]
    assert next(left) == ("c", 6)
    assert tokens_of(session) == [3, 4, 5]


async def test_a_draw_that_raises_reaches_the_consumer(engine: Engine) -> None:
    session = await engine.open(50)
    draws = iter([("a", 5)])
    drawing = session.generate(0, [3, 4], 10, lambda _: next(draws, None) or (1 // 0, None))
    assert (await anext(drawing))[0] == "a"
    with pytest.raises(ZeroDivisionError):
        await anext(drawing)
    assert (await session.evaluate(3, [6], 1, identity))[1].forward_tokens == 1


async def test_closing_the_generator_early_stops_the_drawing(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await engine.open(500)
    calls: list[int] = []
    drawing = session.generate(0, [3, 4, 5], 400, greedy(calls))
    drawn = [(await anext(drawing))[0] for _ in range(3)]
    await drawing.aclose()
    passes = recorded_passes(engine, monkeypatch)
    # It begins where the consumer stopped, whatever was drawn meanwhile.
    text = [3, 4, 5, *drawn]
    assert_close(await evaluate(session, 6, [9]), library.logits([*text, 9], 1))
    assert len(calls) < 400
    assert tokens_of(session) == [*text, 9]
    seen = len(calls)
    await evaluate(session, 7, [10])
    assert len(calls) == seen
    # At most the pass that was being run when it was closed, then the two requests.
    assert len(passes) <= 3
