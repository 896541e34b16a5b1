"""Engines over small models, and the library's own forward to compare with.

    engine = await start_engine(folder, passes=PassLimits(prefill_chunk=16))
    session = await engine.open(100)
    logits = await evaluate(session, 0, tokens, rows=3)
    assert_close(logits, Library(folder).logits(tokens, 3))

An engine takes its model over, so what it is compared with is loaded a second time.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.model import DtypeName, LoadedModel, LoadOptions, load_model
from services.common.engine.options import EngineOptions
from services.common.engine.runner import Feed, ModelRunner
from services.common.engine.session import ModelSession
from tests.support.models import VOCAB

StartEngine: TypeAlias = Callable[..., Awaitable[Engine]]


def load(folder: Path, dtype: DtypeName = "float32") -> LoadedModel:
    """Load a model on the CPU; a second thread only costs time where a model is this small."""
    return load_model(LoadOptions(str(folder), dtype=dtype, device="cpu", threads=1))


@asynccontextmanager
async def engines() -> AsyncIterator[StartEngine]:
    """Provide a function that starts engines; close them all at the end."""
    started: list[Engine] = []

    async def start(folder: Path | LoadedModel, dtype: DtypeName = "float32", **options: Any) -> Engine:
        options.setdefault("kv_cache_memory", "64MiB")
        loaded = folder if isinstance(folder, LoadedModel) else load(folder, dtype)
        started.append(await asyncio.to_thread(Engine, loaded, EngineOptions(**options)))
        return started[-1]

    try:
        yield start
    finally:
        for engine in started:
            await engine.close()


class Library:
    """A model as transformers runs it: the whole text in one forward, no cache."""

    def __init__(self, folder: Path, dtype: DtypeName = "float32") -> None:
        self._loaded = load(folder, dtype)

    def logits(self, tokens: Sequence[int], rows: int) -> torch.Tensor:
        """Return the logits after each of the last `rows` tokens: [rows, vocab]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._loaded.model(torch.tensor([list(tokens)]), use_cache=False).logits
            return logits[0, -rows:, : self._loaded.vocab_size]


def identity(logits: torch.Tensor) -> torch.Tensor:
    """Keep the logits as they are."""
    return logits


async def evaluate(session: ModelSession, base_length: int, tokens: Sequence[int], rows: int = 1) -> torch.Tensor:
    """Return the logits alone."""
    return (await session.evaluate(base_length, tokens, rows, identity))[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Compare logits, relative to the greatest one."""
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * max(1.0, scale))


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Return tokens of the small vocabulary."""
    return [source.randrange(VOCAB) for _ in range(count)]


class Hold:
    """Keeps an engine in a pass: from `await hold.began()` to `hold.release()` everything else that is asked waits."""

    def __init__(self) -> None:
        self._began, self._go_on = threading.Event(), threading.Event()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Take the place of what is made of a request's logits."""
        self._began.set()
        assert self._go_on.wait(30), "nobody released the pass"
        return logits

    async def began(self) -> None:
        """Wait until the pass is held."""
        assert await asyncio.to_thread(self._began.wait, 30), "the request failed, or never had its turn"

    def release(self) -> None:
        """Let the pass go on."""
        self._go_on.set()


async def held(session: ModelSession) -> tuple[Hold, asyncio.Task[Any]]:
    """Hold a session's engine in a pass of one token; return what ends that, and the request to await then."""
    hold = Hold()
    task = asyncio.create_task(session.evaluate(0, [3], 1, hold))
    await hold.began()
    return hold, task


def runner_of(engine: Engine) -> ModelRunner:
    """Return what runs an engine's passes, to watch it or to make it fail."""
    (runner,) = [value for value in vars(engine).values() if isinstance(value, ModelRunner)]
    return runner


def held_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Hold an engine in its next forward, before the books are told of it."""
    hold, run, runner = Hold(), ModelRunner.run, runner_of(engine)

    def wait_then_run(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        hold(torch.empty(0))
        return run(runner, feeds)

    monkeypatch.setattr(runner, "run", wait_then_run)
    return hold


def recorded_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[Feed]]:
    """Return a list that fills with the feeds of each pass from now on."""
    passes: list[list[Feed]] = []
    run, runner = ModelRunner.run, runner_of(engine)

    def record(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        passes.append(list(feeds))
        return run(runner, feeds)

    monkeypatch.setattr(runner, "run", record)
    return passes
