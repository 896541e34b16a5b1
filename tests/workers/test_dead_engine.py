"""A worker whose passes have ended would refuse everybody and look healthy: it ends, and is started again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from services.common.engine.engine import Engine
from services.common.engine.options import EngineOptions
from services.common.engine.work import SessionClosedError
from services.common.rpc.server import stop_signal, stop_this_process
from tests.support.engines import evaluate, load, runner_of
from tests.support.models import make_tiny_llama


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_tells_that_its_passes_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise MemoryError("of the device")

    died = threading.Event()
    loaded = load(make_tiny_llama(tmp_path / "model"))
    engine = await asyncio.to_thread(Engine, loaded, EngineOptions(kv_cache_memory="64MiB"), died.set)
    monkeypatch.setattr(runner_of(engine), "copy", dies)
    first, second = await engine.open(60), await engine.open(60)
    await evaluate(first, 0, [5] * 50)
    assert not died.is_set()
    with pytest.raises(SessionClosedError):
        await evaluate(second, 0, [5] * 50)
    assert died.is_set()
    await engine.close()


async def test_one_that_is_closed_has_not_died(tmp_path: Path) -> None:
    died = threading.Event()
    loaded = load(make_tiny_llama(tmp_path / "model"))
    engine = await asyncio.to_thread(Engine, loaded, EngineOptions(kv_cache_memory="64MiB"), died.set)
    await engine.close()
    assert not died.is_set()


async def test_a_process_can_be_stopped_from_any_thread() -> None:
    async with stop_signal() as stopped:
        await asyncio.to_thread(stop_this_process)
        async with asyncio.timeout(10):
            await stopped.wait()
