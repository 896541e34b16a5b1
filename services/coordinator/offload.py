"""Row-sized work off the event loop, so that one request's rows do not delay another's messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A hop to a thread and back costs about 0.1 ms; numpy gets through this much in less.
INLINE_BYTES: Final = 64 * 1024

_threads = ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1), thread_name_prefix="rows")


async def offload(size_bytes: int, work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run work that touches `size_bytes` of rows: here if they are few, else in a thread."""
    if size_bytes <= INLINE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args))
