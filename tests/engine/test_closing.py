"""Sessions that are closed by the event loop while the thread of the passes is at work on them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.engine.kv_memory import KvMemory
from services.common.engine.session import ModelSession
from services.common.engine.work import Work
from tests.support.engines import Library, StartEngine, assert_close, evaluate, random_tokens

# In the middle of a plan, and between a pass and what is noted of it.
MOMENTS = [(KvMemory, "donor"), (Work, "fed")]


@pytest.mark.parametrize(("owner", "name"), MOMENTS)
async def test_a_session_closed_in_the_middle_of_a_plan_or_a_note_stops_nobody(
    llama_folder: Path,
    library: Library,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    engine = await start_engine(llama_folder)
    closing, other = await engine.open(60), await engine.open(60)
    text = random_tokens(random.Random(1), 50)
    closers: list[threading.Thread] = []
    untouched: Callable[..., object] = getattr(owner, name)

    def close_meanwhile(*arguments: object) -> object:
        if not closers:
            closers.append(threading.Thread(target=ModelSession.close, args=(closing,)))
            closers[0].start()
            # Time enough to close what can be closed now.
            closers[0].join(0.1)
        return untouched(*arguments)

    monkeypatch.setattr(owner, name, close_meanwhile)
    await asyncio.gather(evaluate(closing, 0, text), return_exceptions=True)
    await asyncio.to_thread(closers[0].join)
    assert closing.lease is None
    assert engine.memory.sessions == 1
    assert_close(await evaluate(other, 0, text), library.logits(text, 1))
