"""Who is let in, in what order, and that nothing is lost when somebody gives up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.common.engine.admission import Admission, AdmissionLimits
from services.common.engine.kv_memory import KvMemory, Lease
from services.common.specdec.errors import CapacityError


def admission(size: int = 100, sessions: int = 10, waiting: int = 10, wait_s: float = 60.0) -> Admission:
    return Admission(KvMemory(size), threading.Condition(), AdmissionLimits(sessions, waiting, wait_s))


def books(one: Admission) -> tuple[int, int, int]:
    return one._memory.sessions, one._memory.reserved, one.waiting


async def waits(one: Admission, length: int) -> asyncio.Task[Lease]:
    """Ask for a range that is not to be had now."""
    before = one.waiting
    task = asyncio.create_task(one.reserve(length))
    await asyncio.sleep(0)
    assert one.waiting == before + 1
    return task


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_fits_does_not_wait() -> None:
    one = admission()
    leases = [await one.reserve(40), await one.reserve(60)]
    assert books(one) == (2, 100, 0)
    for lease in leases:
        one.release(lease)
    assert books(one) == (0, 0, 0)


async def test_those_who_wait_are_let_in_in_order() -> None:
    one = admission()
    first = await one.reserve(100)
    tasks = [await waits(one, length) for length in (30, 50, 40)]
    one.release(first)
    await settle()
    assert [task.done() for task in tasks] == [True, True, False]
    one.release(await tasks[0])
    await settle()
    assert not tasks[2].done(), "30 places are free and 20, not next to each other"
    one.release(await tasks[1])
    assert (await tasks[2]).length == 40
    assert books(one) == (1, 40, 0)


async def test_the_number_of_sessions_is_limited_too() -> None:
    one = admission(sessions=2)
    first, _ = await one.reserve(1), await one.reserve(1)
    third = await waits(one, 1)
    one.release(first)
    await third
    assert books(one) == (2, 2, 0)


async def test_a_large_one_at_the_head_is_not_overtaken() -> None:
    one = admission()
    first = await one.reserve(50)
    large = await waits(one, 80)
    small = await waits(one, 10)
    late = await waits(one, 10)
    assert not small.done(), "50 places are free, but the large one would wait for ever"
    one.release(first)
    await settle()
    assert large.done()
    assert small.done()
    assert late.done()
    assert books(one) == (3, 100, 0)


async def test_when_the_large_one_gives_up_the_small_ones_go_at_once() -> None:
    one = admission()
    await one.reserve(50)
    large = await waits(one, 80)
    small = [await waits(one, 10), await waits(one, 20)]
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await settle()
    assert [task.done() for task in small] == [True, True]
    assert books(one) == (3, 80, 0)


async def test_the_queue_is_bounded_and_the_message_names_the_settings() -> None:
    one = admission(size=100, sessions=3, waiting=1)
    await one.reserve(60)
    waiting = await waits(one, 60)
    with pytest.raises(CapacityError) as caught:
        await one.reserve(1)
    assert str(caught.value) == (
        "1 of 3 sessions (--max-sessions) hold 60 of 100 tokens of KV cache (--kv-cache-memory), "
        "and 1 more wait (--max-waiting-sessions)"
    )
    # Who has given up takes no place in the queue.
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await one.reserve(1)).length == 1


async def test_a_queue_of_none_refuses_at_once() -> None:
    one = admission(waiting=0)
    await one.reserve(100)
    with pytest.raises(CapacityError, match="and 0 more wait"):
        await one.reserve(1)


async def test_the_wait_is_bounded_and_the_message_names_the_settings() -> None:
    one = admission(size=100, sessions=3, wait_s=0.01)
    await one.reserve(60)
    with pytest.raises(CapacityError) as caught:
        await one.reserve(60)
    assert str(caught.value) == (
        "1 of 3 sessions (--max-sessions) hold 60 of 100 tokens of KV cache (--kv-cache-memory), "
        "and none of them ended within 0.01 s (--session-wait-s)"
    )
    assert books(one) == (1, 60, 0)


async def test_one_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    one = admission()
    first = await one.reserve(100)
    second, third = await waits(one, 100), await waits(one, 100)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert one.waiting == 1
    one.release(first)
    one.release(await third)
    assert books(one) == (0, 0, 0)


async def test_one_that_is_cancelled_in_the_moment_of_the_grant_gives_it_on() -> None:
    one = admission()
    first = await one.reserve(100)
    second, third = await waits(one, 100), await waits(one, 100)
    one.release(first)
    assert books(one) == (1, 100, 1), "granted, but its task has not run yet"
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    one.release(await third)
    assert books(one) == (0, 0, 0)


async def test_nothing_is_lost_when_all_come_and_go_at_once() -> None:
    one = admission(size=100, sessions=4, waiting=50)

    async def session(i: int) -> None:
        lease = await one.reserve(10 + 13 * i % 90)
        try:
            for _ in range(i % 5):
                await asyncio.sleep(0)
        finally:
            one.release(lease)

    tasks = [asyncio.create_task(session(i)) for i in range(40)]
    for task in tasks[::3]:
        await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert results.count(None) >= 26
    assert books(one) == (0, 0, 0)
