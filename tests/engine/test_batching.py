"""Many sessions in shared passes: each has the answers that it would have alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from services.common.engine.admission import AdmissionLimits
from services.common.engine.engine import Engine
from services.common.engine.kv_pool import KvPool
from services.common.engine.runner import Feed, ModelRunner
from services.common.engine.scheduler import PassLimits
from services.common.engine.session import ModelSession
from services.common.engine.timing import PassTiming
from services.common.engine.work import SessionClosedError
from services.common.specdec.errors import CapacityError
from tests.support.engines import (
    Hold,
    Library,
    StartEngine,
    assert_close,
    evaluate,
    held,
    held_run,
    identity,
    random_tokens,
    recorded_passes,
    runner_of,
)

Answer = tuple[torch.Tensor, PassTiming]
Request = tuple[ModelSession, list[int], Callable[[torch.Tensor], torch.Tensor]]


@pytest.fixture
async def engine(llama_folder: object, start_engine: StartEngine) -> Engine:
    return await start_engine(llama_folder, passes=PassLimits(prefill_chunk=16), admission=AdmissionLimits(sessions=16))


async def together(engine: Engine, requests: Sequence[Request], rows: int = 1) -> list[Answer | BaseException]:
    """Ask all from their sessions' beginning, while the engine is held in a pass: they share the next one."""
    holder = await engine.open(1)
    hold, holding = await held(holder)
    asked = [asyncio.create_task(session.evaluate(0, tokens, rows, use)) for session, tokens, use in requests]
    while engine.queue < len(asked) + 1:
        await asyncio.sleep(0)
    hold.release()
    await holding
    holder.close()
    return await asyncio.gather(*asked, return_exceptions=True)


async def walk(engine: Engine, library: Library, seed: int) -> int:
    """Live one session's life with a random text; return the largest batch it was part of."""
    source = random.Random(seed)
    largest = 0
    for _ in range(2):
        session = await engine.open(120)
        text: list[int] = []
        for _ in range(8):
            keep = source.randrange(max(0, len(text) - 6), len(text) + 1)
            new = random_tokens(source, source.choice([1, 1, 3, 6, 40 if len(text) < 60 else 2]))
            rows = source.randrange(1, len(new) + 1)
            text = text[:keep] + new
            logits, timing = await session.evaluate(keep, new, rows, identity)
            assert_close(logits, library.logits(text, rows))
            assert timing.forward_tokens == len(new)
            largest = max(largest, timing.batch_size)
        session.close()
    return largest


async def test_ragged_sessions_that_come_and_go_have_the_librarys_answers(engine: Engine, library: Library) -> None:
    largest = await asyncio.gather(*(walk(engine, library, seed) for seed in range(8)))
    assert max(largest) >= 3
    assert engine.counters.shares > 1.5 * engine.counters.passes
    assert engine.memory.sessions == 0


async def test_a_batch_equals_one_by_one(engine: Engine, library: Library) -> None:
    source = random.Random(2)
    texts = [random_tokens(source, length) for length in (3, 4, 5, 6, 7)]
    sessions = [await engine.open(20) for _ in texts]
    before = engine.counters.passes
    answers = await together(engine, [(s, t, identity) for s, t in zip(sessions, texts, strict=True)], rows=3)
    assert engine.counters.passes - before == 2, "the one that was held, and one for all"
    for session, text, answer in zip(sessions, texts, answers, strict=True):
        assert not isinstance(answer, BaseException)
        logits, timing = answer
        assert timing.batch_size == len(texts)
        alone, timing = await session.evaluate(0, text, 3, identity)
        assert timing.batch_size == 1
        assert_close(logits, alone, 1e-5)
        assert_close(logits, library.logits(text, 3))


async def test_a_step_that_raises_hits_its_own_request_only(engine: Engine, library: Library) -> None:
    def raises(_: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    sessions = [await engine.open(20) for _ in range(3)]
    text = [5, 6, 7]
    uses = (identity, raises, identity)
    first, second, third = await together(engine, [(s, text, use) for s, use in zip(sessions, uses, strict=True)])
    assert isinstance(second, ZeroDivisionError)
    for answer in (first, third):
        assert not isinstance(answer, BaseException)
        assert answer[1].batch_size == 3
        assert_close(answer[0], library.logits(text, 1))
    # And its session goes on.
    assert_close(await evaluate(sessions[1], 3, [8]), library.logits([*text, 8], 1))


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("a bad one"), RuntimeError), (torch.OutOfMemoryError("all of it"), CapacityError)],
)
async def test_a_pass_that_fails_is_run_again_one_by_one(
    engine: Engine,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: type[Exception],
) -> None:
    run, runner = ModelRunner.run, runner_of(engine)

    def fail_for_99(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        if any(99 in feed.tokens for feed in feeds):
            raise error
        return run(runner, feeds)

    monkeypatch.setattr(runner, "run", fail_for_99)
    sessions = [await engine.open(20) for _ in range(3)]
    texts = [[5, 6], [99, 6], [7, 8]]
    first, second, third = await together(engine, [(s, t, identity) for s, t in zip(sessions, texts, strict=True)])
    assert isinstance(second, told)
    for text, answer in ((texts[0], first), (texts[2], third)):
        assert not isinstance(answer, BaseException)
        assert_close(answer[0], library.logits(text, 1))
    assert "a pass over 3 sessions failed: one by one" in caplog.text
    # The session itself is as it was before: what failed is fed again.
    monkeypatch.undo()
    assert_close(await evaluate(sessions[1], 2, [9]), library.logits([99, 6, 9], 1))


async def test_not_a_number_in_one_cache_touches_no_other(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[5] * 5, [6] * 5, [7] * 5]
    sessions = [await engine.open(20) for _ in texts]
    update = KvPool.update
    broken = sessions[1].lease
    assert broken is not None

    def spoil(
        self: KvPool, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = update(self, keys, values, layer)
        for tensor in (keys, values):
            tensor[:, :, broken.start : broken.start + broken.length] = torch.nan
        return keys, values

    monkeypatch.setattr(KvPool, "update", spoil)
    first, second, third = await together(engine, [(s, t, identity) for s, t in zip(sessions, texts, strict=True)])
    assert not isinstance(second, BaseException)
    assert second[0].isnan().all()
    for text, answer in ((texts[0], first), (texts[2], third)):
        assert not isinstance(answer, BaseException)
        assert answer[1].batch_size == 3
        assert_close(answer[0], library.logits(text, 1))
    # Nor whoever has these places next.
    monkeypatch.undo()
    sessions[1].close()
    following = await engine.open(20)
    assert following.lease is not None
    assert following.lease.start == broken.start
    assert_close(await evaluate(following, 0, [8] * 12, 2), library.logits([8] * 12, 2))


async def test_a_session_closed_during_its_pass_leaves_nothing_broken(
    llama_folder: object, library: Library, start_engine: StartEngine
) -> None:
    engine = await start_engine(llama_folder, admission=AdmissionLimits(sessions=1))
    session = await engine.open(40)
    lease = session.lease
    hold = Hold()
    text = random_tokens(random.Random(3), 34)
    asked = asyncio.create_task(session.evaluate(0, text, 1, hold))
    await hold.began()
    session.close()
    assert (engine.memory.sessions, engine.memory.reserved) == (0, 0)
    # The next owner has the places at once, and asks while the pass goes on.
    following = await engine.open(engine.memory.size)
    assert lease is not None
    assert following.lease is not None
    assert following.lease.start <= lease.start
    other = random_tokens(random.Random(4), 50)
    waiting = asyncio.create_task(evaluate(following, 0, other, 3))
    await asyncio.sleep(0)
    hold.release()
    assert_close((await asked)[0], library.logits(text, 1))
    assert_close(await waiting, library.logits(other, 3))
    following.close()
    # What is kept of both is what it says it is.
    again = await engine.open(60)
    logits, timing = await again.evaluate(0, [*other, 9], 1, identity)
    assert timing.reused_tokens == 50
    assert_close(logits, library.logits([*other, 9], 1))


async def test_a_session_closed_during_its_forward_leaves_nothing_broken(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = await engine.open(40), await engine.open(40)
    lease, hold = session.lease, held_run(engine, monkeypatch)
    assert lease is not None
    asked = asyncio.create_task(evaluate(session, 0, [5, 6, 7]))
    await hold.began()
    session.close()
    beside = asyncio.create_task(evaluate(other, 0, [8, 9], 2))
    await asyncio.sleep(0)
    hold.release()
    assert_close(await asked, library.logits([5, 6, 7], 1))
    assert_close(await beside, library.logits([8, 9], 2))
    assert lease.cached == 0, "what it left was kept as it was when it closed"
    assert engine.memory.sessions == 1


async def test_nothing_is_made_of_the_logits_of_a_request_that_is_cancelled_during_its_forward(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, used = await engine.open(40), []
    hold = held_run(engine, monkeypatch)
    asked = asyncio.create_task(session.evaluate(0, [5, 6, 7], 1, used.append))
    await hold.began()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    hold.release()
    # Its tokens are the session's all the same, and cached.
    logits, timing = await session.evaluate(3, [8], 1, identity)
    assert_close(logits, library.logits([5, 6, 7, 8], 1))
    assert timing.forward_tokens == 1
    assert used == []


async def test_a_session_closed_between_the_chunks_of_its_prompt_ends_there(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = await engine.open(200), await engine.open(20)
    passes = recorded_passes(engine, monkeypatch)
    hold, holding = await held(await engine.open(1))
    text = random_tokens(random.Random(5), 200)
    asked = asyncio.create_task(evaluate(session, 0, text))
    second_hold = Hold()
    beside = asyncio.create_task(other.evaluate(0, [5, 6], 1, second_hold))
    await asyncio.sleep(0)
    hold.release()
    await holding
    # The pass with the first chunk is over as to the model; its books are closed too once this step is reached.
    await second_hold.began()
    session.close()
    second_hold.release()
    with pytest.raises(SessionClosedError):
        await asked
    assert_close((await beside)[0], library.logits([5, 6], 1))
    assert sum(len(feed.tokens) for feeds in passes[1:] for feed in feeds) <= 16 + 2


async def test_a_long_prompt_delays_a_running_session_by_one_chunk_a_pass(
    engine: Engine, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = await engine.open(200), await engine.open(40)
    passes = recorded_passes(engine, monkeypatch)
    runner = runner_of(engine)
    run = runner.run

    def run_slowly(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        time.sleep(0.05)
        return run(feeds)

    # So long that the event loop has its turn meanwhile.
    monkeypatch.setattr(runner, "run", run_slowly)
    prompt = random_tokens(random.Random(6), 200)
    hold, holding = await held(await engine.open(1))
    asked = asyncio.create_task(evaluate(long, 0, prompt, 2))
    while engine.queue < 2:
        await asyncio.sleep(0)
    text = [7]
    running = asyncio.create_task(evaluate(short, 0, text))
    await asyncio.sleep(0)
    hold.release()
    await holding
    rounds = 0
    while not asked.done():
        assert_close(await running, library.logits(text, 1))
        rounds += 1
        text.append(8)
        running = asyncio.create_task(evaluate(short, len(text) - 1, [8]))
        await asyncio.sleep(0)
    await running
    assert_close(await asked, library.logits(prompt, 2))
    assert rounds >= 3, "it went on between the chunks"
    assert short.lease is not None
    served = [{feed.start: feed for feed in feeds} for feeds in passes[1:]]
    of_short = [feeds[short.lease.start] for feeds in served if short.lease.start in feeds]
    assert [feed.position for feed in of_short] == list(range(len(of_short))), "never left out, never twice"
    assert all(sum(len(feed.tokens) for feed in feeds.values()) <= 16 + 2 + 1 for feeds in served)


async def test_many_prompts_at_once_share_the_chunk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [await engine.open(60) for _ in range(4)]
    passes = recorded_passes(engine, monkeypatch)
    source = random.Random(7)
    answers = await together(engine, [(session, random_tokens(source, 60), identity) for session in sessions])
    assert not any(isinstance(answer, BaseException) for answer in answers)
    assert all(sum(len(feed.tokens) - feed.rows for feed in feeds) <= 16 for feeds in passes)
    assert len(passes) == 1 + -(-4 * 59 // 16)


async def test_one_that_generates_and_one_that_evaluates_share_passes(engine: Engine, library: Library) -> None:
    first, second = await engine.open(60), await engine.open(60)
    hold, holding = await held(await engine.open(1))

    async def generated() -> list[int]:
        def draw(logits: torch.Tensor) -> tuple[int, int]:
            token = int(logits.argmax())
            return token, token

        return [token async for token, _ in first.generate(0, [3, 4, 5], 6, draw)]

    drawing = asyncio.create_task(generated())
    beside = asyncio.create_task(second.evaluate(0, [9, 8], 2, identity))
    while engine.queue < 3:
        await asyncio.sleep(0)
    hold.release()
    await holding
    logits, timing = await beside
    assert timing.batch_size == 2
    assert_close(logits, library.logits([9, 8], 2))
    text = [3, 4, 5, *await drawing]
    assert text[3:] == [int(library.logits(text[:i], 1).argmax()) for i in range(3, 9)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_the_thread_of_the_passes_dies_nobody_waits_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> None:
        raise MemoryError("of the device")

    monkeypatch.setattr(runner_of(engine), "copy", dies)
    first, second = await engine.open(60), await engine.open(60)
    await evaluate(first, 0, [5] * 50)
    with pytest.raises(SessionClosedError):
        await evaluate(second, 0, [5] * 50)
    with pytest.raises(SessionClosedError):
        await evaluate(first, 50, [6])
