"""Runs a command's coroutine so that Ctrl-C and SIGTERM unwind it instead of breaking it off."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> signal.Signals | None:
    """Run `work` to its end; the first SIGINT or SIGTERM cancels it, and so does each one after.

    Returns:
        The signal that ended it, None if it ended by itself.
    """
    return asyncio.run(_supervise(work))


def run_or_exit(work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; exit as the shell expects, 128 and the number, where a signal ended it.

    Raises:
        SystemExit: A signal ended it.
    """
    received = run(work)
    if received is not None:
        raise SystemExit(128 + received)


async def _supervise(work: Coroutine[Any, Any, None]) -> signal.Signals | None:
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []
    task = asyncio.ensure_future(work)

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        # Cancelled again while it cleans up, it stops waiting for what it is polite to.
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return received[0] if received else None
