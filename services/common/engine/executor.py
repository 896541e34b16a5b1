"""The one thread that runs forward passes, first come first served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class PassExecutor:
    """Runs torch work away from the event loop, one job at a time.

    One thread and not a pool: a pass uses all cores (or the whole device), and what only jobs touch needs no lock.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward-passes")

    async def run(self, job: Callable[[], T]) -> tuple[T, float, float]:
        """Run a job after those before it; return its result, the seconds it waited and the seconds it ran.

        Cancelled while it waits, the job is never run; cancelled later, it runs to its end and the result is dropped.
        """
        submitted_s = time.perf_counter()

        def timed() -> tuple[T, float, float]:
            started_s = time.perf_counter()
            with torch.inference_mode():
                result = job()
            return result, started_s - submitted_s, time.perf_counter() - started_s

        return await asyncio.wrap_future(self._thread.submit(timed))

    def close(self) -> None:
        """Wait for the running job, drop the others, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
