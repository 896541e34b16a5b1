"""Many concurrent answers, and what the process that writes them spends on a round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from paceline.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2

# Long, so that opening and closing the sessions is little of a window.
_MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Spent:
    """What a process has used so far, or within a window.

    Attributes:
        wall_s: By this process's clock.
        cpu_s: In all threads, user and system.
        loop_s: In the main thread, which runs the event loop.
        rounds: Rounds that its clients saw the end of.
        tokens: Tokens that they got.
        accepted: Those of them that were drafted.
        rejected: Those that came in place of a rejected draft.
    """

    wall_s: float
    cpu_s: float
    loop_s: float
    rounds: int
    tokens: int
    accepted: int
    rejected: int

    def since(self, before: Spent) -> Spent:
        """Return what has been used since then."""
        return Spent(*(getattr(self, name) - getattr(before, name) for name in Spent.__slots__))


class Load:
    """Streams of Generate that never end, for one process."""

    def __init__(self, stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, pid: int, gamma: int) -> None:
        """Take the process.

        Args:
            stub: Reaches it.
            pid: Is it.
            gamma: Drafts in a round.
        """
        self._stub = stub
        self._process = psutil.Process(pid)
        self._gamma = gamma
        self._rounds = self._tokens = self._accepted = self._rejected = 0

    async def window(self, streams: int, warm_up_s: float, window_s: float) -> Spent:
        """Run that many streams and return what was spent in a window of steady work."""
        running = [asyncio.create_task(self._stream(seed)) for seed in range(streams)]
        try:
            await self._steady(running, warm_up_s)
            before = self._spent()
            await self._steady(running, window_s)
            return self._spent().since(before)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _steady(self, running: list[asyncio.Task[None]], seconds: float) -> None:
        """Wait; a stream that ends has failed."""
        done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _stream(self, seed: int) -> None:
        while True:
            request = coordinator_pb2.GenerateRequest(
                tokens=coordinator_pb2.TokenPrompt(ids=[1, 2, 3]),
                sampling=worker_pb2.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
                seed=seed,
                max_tokens=_MAX_TOKENS,
                gamma=self._gamma,
            )
            # Its process may have only just begun to listen.
            call = self._stub.Generate(request, wait_for_ready=True)
            try:
                async for response in call:
                    self._count(response.chunk.tokens)
            finally:
                call.cancel()

    def _count(self, tokens: Iterable[coordinator_pb2.Token]) -> None:
        for token in tokens:
            self._tokens += 1
            if token.origin == coordinator_pb2.TOKEN_ORIGIN_ACCEPTED_DRAFT:
                self._accepted += 1
            else:
                # Every round ends with one token that was not drafted.
                self._rounds += 1
                self._rejected += token.origin == coordinator_pb2.TOKEN_ORIGIN_RESIDUAL

    def _spent(self) -> Spent:
        used = self._process.cpu_times()
        main = next(each for each in self._process.threads() if each.id == self._process.pid)
        return Spent(
            wall_s=time.perf_counter(),
            cpu_s=used.user + used.system,
            loop_s=main.user_time + main.system_time,
            rounds=self._rounds,
            tokens=self._tokens,
            accepted=self._accepted,
            rejected=self._rejected,
        )
