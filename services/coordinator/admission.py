"""How many requests run at once, and when one that is refused may hope for room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import grpc

from services.common.rpc.errors import RpcError
from services.coordinator.instruments import Instruments
from services.coordinator.request_metrics import RequestClock

# What a client is told as long as no request has ended, and the bounds of what it is told later.
_UNKNOWN_S = 1.0
_LEAST_S, _MOST_S = 0.1, 60.0
# Weight of the newest request in the running mean.
_NEWEST = 0.1


class Admission:
    """Counts the requests that run."""

    def __init__(self, limit: int, instruments: Instruments) -> None:
        self._limit = limit
        self._metrics = instruments.requests
        instruments.watch_limit(limit)
        self._running = 0
        self._mean_s: float | None = None

    @contextlib.asynccontextmanager
    async def admitted(self) -> AsyncIterator[RequestClock]:
        """Count a request in and, however it ends, out; those that are refused are timed too.

        Raises:
            RpcError: RESOURCE_EXHAUSTED, `limit` requests are running.
        """
        with self._metrics.request() as clock:
            if self._running >= self._limit:
                told = f"{self._limit} requests are running, the limit (--max-requests)"
                raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, told, retry_after_s=self.retry_after_s())
            started_s = time.monotonic()
            self._running += 1
            self._metrics.running.add(1)
            try:
                yield clock
            finally:
                self._running -= 1
                self._metrics.running.add(-1)
                self._learn(time.monotonic() - started_s)

    @property
    def running(self) -> int:
        """Requests that run now."""
        return self._running

    def retry_after_s(self) -> float:
        """Return when one of the requests that run now is likely to end: the time of one, shared by all."""
        if self._mean_s is None:
            return _UNKNOWN_S
        return min(max(self._mean_s / max(1, self._running), _LEAST_S), _MOST_S)

    def _learn(self, took_s: float) -> None:
        self._mean_s = took_s if self._mean_s is None else self._mean_s + _NEWEST * (took_s - self._mean_s)
