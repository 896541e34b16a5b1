from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from services.common.engine.executor import PassExecutor


async def test_jobs_run_in_order_on_one_named_thread_without_gradients(executor: PassExecutor) -> None:
    order: list[int] = []

    def job(i: int) -> tuple[str, bool]:
        order.append(i)
        return threading.current_thread().name, torch.is_inference_mode_enabled()

    results = await asyncio.gather(*(executor.run(lambda i=i: job(i)) for i in range(20)))
    assert order == list(range(20))
    assert len({name for (name, _), _, _ in results}) == 1
    assert results[0][0][0].startswith("forward-passes")
    assert all(inference for (_, inference), _, _ in results)


async def test_times_tell_waiting_from_running(executor: PassExecutor) -> None:
    started, release = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        release.wait()

    running = asyncio.create_task(executor.run(first))
    await asyncio.to_thread(started.wait)
    waiting = asyncio.create_task(executor.run(lambda: 7))
    await asyncio.sleep(0.05)
    release.set()
    (_, _, first_run_s), (result, queue_s, run_s) = await asyncio.gather(running, waiting)
    assert result == 7
    assert queue_s >= 0.04
    assert first_run_s >= 0.04
    assert run_s < queue_s


async def test_an_exception_reaches_the_caller_and_the_thread_lives_on(executor: PassExecutor) -> None:
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 // 0)
    assert (await executor.run(lambda: 1))[0] == 1


async def test_close_drops_what_waits() -> None:
    executor = PassExecutor()
    started, release = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        started.set()
        release.wait()
        ran.append(1)

    running = asyncio.create_task(executor.run(first))
    await asyncio.to_thread(started.wait)
    waiting = asyncio.create_task(executor.run(lambda: ran.append(2)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(executor.close))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    await closing
    await running
    assert ran == [1]
