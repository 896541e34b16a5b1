"""Who may hold a KV range: first come first served, in a queue that is bounded in length and in time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from services.common.engine.kv_memory import KvMemory, Lease
from services.common.specdec.errors import CapacityError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many sessions there may be.

    Attributes:
        sessions: Most that hold a range at a time.
        waiting: Most that wait for one.
        wait_s: Longest wait.
    """

    sessions: int = 64
    waiting: int = 64
    wait_s: float = 10.0


class Admission:
    """Grants ranges for the whole of what a session may grow to, so that admitted sessions never wait for memory.

    The queue keeps its order: a small session does not overtake a large one, which could then wait for ever. Used from
    one event loop; the memory itself is shared with the thread of the passes, under the lock.

    Attributes:
        limits: How many there may be.
    """

    def __init__(self, memory: KvMemory, lock: threading.Condition, limits: AdmissionLimits) -> None:
        self._memory = memory
        self._lock = lock
        self.limits = limits
        self._queue: deque[tuple[int, asyncio.Future[Lease]]] = deque()

    @property
    def waiting(self) -> int:
        """Sessions that wait for a range; from any thread."""
        # Copied in one step: the event loop may change it meanwhile.
        return sum(not granted.cancelled() for _, granted in tuple(self._queue))

    async def reserve(self, length: int) -> Lease:
        """Return a range of `length` places.

        Raises:
            CapacityError: The queue is full, or it did not move enough in time.
        """
        if not self._queue and (lease := self._grant(length)) is not None:
            return lease
        if self.waiting >= self.limits.waiting:
            raise CapacityError(f"{self._taken()}, and {self.waiting} more wait (--max-waiting-sessions)")
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._queue.append((length, granted))
        try:
            async with asyncio.timeout(self.limits.wait_s):
                return await granted
        except BaseException as error:
            if granted.cancelled():
                # It may have been the large one that held up smaller ones.
                self._advance()
            else:
                # Granted in the very moment in which the waiting was given up.
                self.release(granted.result())
            if isinstance(error, TimeoutError):
                raise CapacityError(
                    f"{self._taken()}, and none of them ended within {self.limits.wait_s:g} s (--session-wait-s)"
                ) from None
            raise

    def release(self, lease: Lease) -> None:
        """Give a range back, and let those that wait have it."""
        self._give_back(lease)
        self._advance()

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            self._memory.release(lease)

    def _grant(self, length: int) -> Lease | None:
        with self._lock:
            return self._memory.reserve(length) if self._memory.sessions < self.limits.sessions else None

    def _advance(self) -> None:
        while self._queue:
            length, granted = self._queue[0]
            if not granted.cancelled():
                if (lease := self._grant(length)) is None:
                    return
                granted.set_result(lease)
            self._queue.popleft()

    def _taken(self) -> str:
        memory = self._memory
        return (
            f"{memory.sessions} of {self.limits.sessions} sessions (--max-sessions) hold {memory.reserved} of "
            f"{memory.size} tokens of KV cache (--kv-cache-memory)"
        )
