"""A beginning that another session has fed is copied, not fed again, and only where every token is the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.prefixes import BLOCK
from services.common.engine.runner import ModelRunner
from services.common.engine.scheduler import PassLimits
from services.common.engine.session import ModelSession
from services.common.engine.timing import PassTiming
from tests.support.engines import (
    Library,
    StartEngine,
    assert_close,
    evaluate,
    held,
    identity,
    random_tokens,
    recorded_passes,
    runner_of,
)
from tests.support.models import ARCHITECTURES, VOCAB, make_tiny

Ask: TypeAlias = Callable[..., Awaitable[PassTiming]]

PREFIX = random_tokens(random.Random(1), 100)


@pytest.fixture
async def engine(llama_folder: Path, start_engine: StartEngine) -> Engine:
    return await start_engine(llama_folder)


@pytest.fixture
def ask(library: Library) -> Ask:
    async def asked(session: ModelSession, text: list[int], rows: int = 1) -> PassTiming:
        """Ask from the beginning; the answer is always what a recomputation has."""
        logits, timing = await session.evaluate(0, text, rows, identity)
        assert_close(logits, library.logits(text, rows))
        assert timing.forward_tokens + timing.reused_tokens == len(text)
        return timing

    return asked


async def test_the_second_session_feeds_only_the_rest(engine: Engine, library: Library, ask: Ask) -> None:
    first, second = await engine.open(150), await engine.open(150)
    assert (await ask(first, [*PREFIX, 5, 6])).reused_tokens == 0
    timing = await ask(second, [*PREFIX, 7, 8, 9], rows=2)
    assert (timing.reused_tokens, timing.forward_tokens) == (100, 3)
    assert (engine.counters.prefix_hits, engine.counters.reused_tokens) == (1, 100)
    # From here on they have nothing to do with each other.
    for session, own in ((first, [5, 6]), (second, [7, 8, 9])):
        text = [*PREFIX, *own, 10, 11]
        assert_close(await evaluate(session, 100 + len(own), [10, 11], 2), library.logits(text, 2))
    text = [*PREFIX[:90], 12]
    assert_close(await evaluate(first, 90, [12]), library.logits(text, 1))
    assert_close(await evaluate(second, 105, [13]), library.logits([*PREFIX, 7, 8, 9, 10, 11, 13], 1))


@pytest.mark.parametrize("name", ["mistral with windows", "gemma3 with some windows", "gpt2 with learned positions"])
async def test_it_holds_for_windows_and_for_learned_positions(
    start_engine: StartEngine, tmp_path: Path, name: str
) -> None:
    folder = make_tiny(tmp_path / "model", ARCHITECTURES[name]())
    engine, library = await start_engine(folder), Library(folder)
    await evaluate(await engine.open(150), 0, PREFIX)
    second = await engine.open(150)
    logits, timing = await second.evaluate(0, [*PREFIX, 7, 8], 2, identity)
    assert timing.reused_tokens == 100
    assert_close(logits, library.logits([*PREFIX, 7, 8], 2))
    assert_close(await evaluate(second, 97, [9, 10]), library.logits([*PREFIX[:97], 9, 10], 1))


async def test_positions_whose_logits_are_wanted_are_fed(engine: Engine, ask: Ask) -> None:
    await ask(await engine.open(100), PREFIX)
    timing = await ask(await engine.open(100), PREFIX, rows=7)
    assert (timing.reused_tokens, timing.forward_tokens) == (93, 7)
    timing = await ask(await engine.open(100), PREFIX, rows=100 - BLOCK + 1)
    assert timing.reused_tokens == 0, "less than a block is not worth a copy"


@pytest.mark.parametrize("chunk", [16, 64, 256])
async def test_of_sessions_that_arrive_together_one_feeds_the_prefix(
    llama_folder: Path,
    library: Library,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    engine = await start_engine(llama_folder, passes=PassLimits(prefill_chunk=chunk))
    texts = [[*PREFIX, 20 + i, 30 + i] for i in range(4)]
    sessions = [await engine.open(110) for _ in texts]
    hold, holding = await held(await engine.open(1))
    passes = recorded_passes(engine, monkeypatch)
    asked = [asyncio.create_task(evaluate(s, 0, text, 2)) for s, text in zip(sessions, texts, strict=True)]
    while engine.queue < 5:
        await asyncio.sleep(0)
    hold.release()
    await holding
    for text, logits in zip(texts, await asyncio.gather(*asked), strict=True):
        assert_close(logits, library.logits(text, 2))
    fed = sum(len(feed.tokens) for feeds in passes for feed in feeds)
    # One waits for another's chunks as long as it gains a block by it.
    assert 102 + 3 * 2 <= fed < 102 + 3 * (2 + BLOCK)
    if chunk >= 100:
        assert fed == 102 + 3 * 2, "the prefix once, of each its own end"
    assert engine.counters.prefix_hits == 3


async def test_a_donor_that_has_closed_still_gives(engine: Engine, ask: Ask) -> None:
    first = await engine.open(150)
    await ask(first, [*PREFIX, 5, 6])
    first.close()
    assert engine.memory.kept == 102
    assert (await ask(await engine.open(150), [*PREFIX, 5, 7])).reused_tokens == 101


async def test_a_donor_that_was_cropped_gives_what_it_still_has(engine: Engine, library: Library, ask: Ask) -> None:
    first = await engine.open(150)
    await ask(first, PREFIX)
    text = [*PREFIX[:60], *[9] * 20]
    assert_close(await evaluate(first, 60, [9] * 20), library.logits(text, 1))
    assert (await ask(await engine.open(150), [*PREFIX, 5])).reused_tokens == 60
    # And what it went on with, too.
    assert (await ask(await engine.open(150), [*text, 5])).reused_tokens == 80


async def test_a_donor_that_is_cropped_in_the_very_pass_gives_what_is_right(
    engine: Engine, library: Library, ask: Ask
) -> None:
    first, second = await engine.open(150), await engine.open(150)
    await ask(first, PREFIX)
    hold, holding = await held(await engine.open(1))
    cropped = asyncio.create_task(evaluate(first, 50, [9] * 30, 30))
    beside = asyncio.create_task(ask(second, [*PREFIX, 5]))
    while engine.queue < 3:
        await asyncio.sleep(0)
    hold.release()
    await holding
    assert_close(await cropped, library.logits([*PREFIX[:50], *[9] * 30], 30))
    assert (await beside).reused_tokens == 50


async def test_a_donor_that_was_evicted_gives_nothing(llama_folder: Path, start_engine: StartEngine, ask: Ask) -> None:
    engine = await start_engine(llama_folder)
    first = await engine.open(150)
    await ask(first, PREFIX)
    first.close()
    everything = await engine.open(engine.memory.size)
    assert engine.memory.kept == 0
    # Its places are used for something else.
    assert (await ask(everything, [7] * 120)).reused_tokens == 0
    everything.close()
    assert (await ask(await engine.open(150), PREFIX)).reused_tokens == 0


async def test_a_donor_that_is_evicted_between_plan_and_copy_is_still_there_for_it(
    engine: Engine, library: Library, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await engine.open(100)
    await ask(first, PREFIX)
    second = await engine.open(150)
    await engine.open(engine.memory.size - 250)
    first.close()
    runner = runner_of(engine)
    owners: list[ModelSession] = []

    def evict_then_copy(source: int, target: int, length: int) -> None:
        # The books are open to the event loop then.
        lease = engine.memory.reserve(100)
        assert lease is not None
        assert lease.start == source
        owners.append(ModelSession(engine, lease))
        ModelRunner.copy(runner, source, target, length)

    monkeypatch.setattr(runner, "copy", evict_then_copy)
    assert (await ask(second, [*PREFIX, 5])).reused_tokens == 100
    assert engine.memory.kept == 0
    (owner,) = owners
    assert_close(await evaluate(owner, 0, [8] * 100, 3), library.logits([8] * 100, 3))
    assert_close(await evaluate(second, 101, [6]), library.logits([*PREFIX, 5, 6], 1))


@pytest.mark.parametrize("place", [0, 1, BLOCK - 1, BLOCK, 50, 98, 99])
async def test_nothing_is_reused_from_where_the_tokens_differ(engine: Engine, ask: Ask, place: int) -> None:
    await ask(await engine.open(150), [*PREFIX, 5, 6])
    other = list(PREFIX)
    other[place] = (other[place] + 1) % VOCAB
    timing = await ask(await engine.open(150), [*other, 5, 6])
    assert timing.reused_tokens == (place if place >= BLOCK else 0)


async def test_what_fails_in_the_pass_is_given_to_nobody(
    engine: Engine, library: Library, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await engine.open(150)

    def fail(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("no pass")

    with monkeypatch.context() as patch:
        patch.setattr("services.common.engine.runner.ModelRunner.run", fail)
        with pytest.raises(RuntimeError, match="no pass"):
            await evaluate(first, 0, PREFIX)
    assert (await ask(await engine.open(150), [*PREFIX, 5])).reused_tokens == 0
    assert_close(await evaluate(first, 100, [6]), library.logits([*PREFIX, 6], 1))


async def test_whoever_waits_for_a_prefix_goes_on_when_the_one_ahead_gives_up(
    llama_folder: Path, start_engine: StartEngine, ask: Ask
) -> None:
    engine = await start_engine(llama_folder, passes=PassLimits(prefill_chunk=16))
    first, second = await engine.open(150), await engine.open(150)
    hold, holding = await held(await engine.open(1))
    ahead = asyncio.create_task(evaluate(first, 0, [*PREFIX, 5]))
    behind = asyncio.create_task(ask(second, [*PREFIX, 6]))
    while engine.queue < 3:
        await asyncio.sleep(0)
    ahead.cancel()
    await asyncio.gather(ahead, return_exceptions=True)
    hold.release()
    await holding
    assert (await behind).forward_tokens == 101


async def test_a_random_crowd_with_few_beginnings_has_the_librarys_answers(
    llama_folder: Path, library: Library, start_engine: StartEngine, ask: Ask
) -> None:
    source = random.Random(8)
    engine = await start_engine(llama_folder, passes=PassLimits(prefill_chunk=48))
    beginnings = [random_tokens(source, 120) for _ in range(2)]

    async def one(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(3):
            session = await engine.open(200)
            text = own.choice(beginnings)[: own.randrange(20, 120)] + random_tokens(own, own.randrange(1, 30))
            await ask(session, text, own.randrange(1, 4))
            keep = own.randrange(len(text))
            text = text[:keep] + random_tokens(own, 5)
            assert_close(await evaluate(session, keep, text[keep:], 2), library.logits(text, 2))
            session.close()

    await asyncio.gather(*(one(seed) for seed in range(6)))
    assert engine.counters.prefix_hits >= 6
    assert engine.memory.sessions == 0
