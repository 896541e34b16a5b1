"""Hundreds of short sessions of all kinds through real processes: nothing grows and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, worker_pb2
from tests.faults.conftest import OFFLINE, STEADY
from tests.support.processes import GREEDY, Coordinator, Processes, Service

pytestmark = pytest.mark.slow
SESSIONS = 600
AT_ONCE = 8
# The means of these are compared: 300 sessions lie between them.
EARLY, LATE = slice(200, 300), slice(500, 600)
# A leak of 7 KiB a session at a draft worker, of 10 at a coordinator, each of which serves half of them, or of 5 at the
# target is caught. What is allowed is the allocators' unrest: .5 MiB, 1.8 in one run of the draft's.
MOST_GROWTH_MIB = {"target": 1.5, "draft": 2.0, "coordinator": 1.5}
# 4,096 tokens of 256 bytes in the target, all of which have soon been written to, so that all is resident early.
POOL = ("--dtype", "float32", "--kv-cache-memory", "1MiB", "--session-wait-s", "60")
POOL_TOKENS = 3_900
PREFIXES = [f"{word} " * 20 for word in ("Once", "upon", "a", "time", "there")]
PLAIN = worker_pb2.SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Paceline:
    """A target, both kinds of draft, and a coordinator for each of them."""

    target: Service
    drafts: Sequence[Service]
    coordinators: Sequence[Coordinator]

    @property
    def services(self) -> dict[str, Service]:
        """All, by what they are."""
        model, ngram = self.drafts
        of_model, of_ngram = self.coordinators
        return {
            "target": self.target,
            "draft (model)": model,
            "draft (n-gram)": ngram,
            "coordinator (model)": of_model,
            "coordinator (n-gram)": of_ngram,
        }


@pytest.fixture
def paceline(models: Path, tmp_path: Path) -> Iterator[Paceline]:
    with Processes(tmp_path, OFFLINE | STEADY) as run:
        target = run.target("--model", str(models / "target"), "--features", "none", *POOL)
        drafts = [run.draft("--drafter", "model", "--model", str(models / "draft"), *POOL), run.draft()]
        yield Paceline(target, drafts, [run.coordinator(target, draft) for draft in drafts])


def request(n: int, **fields: Any) -> pb.GenerateRequest:
    made: dict[str, Any] = {
        "text": f"{PREFIXES[n % len(PREFIXES)]}{n} {'x' * (n * 7 % 60)}",
        "gamma": n % 6,
        "seed": n,
        "max_tokens": 8 + n * 5 % 40,
        "sampling": GREEDY if n % 4 < 2 else PLAIN,
        "stop": pb.StopConditions(ignore_eos=True),
    }
    return pb.GenerateRequest(**made | fields)


async def session(address: str, n: int) -> None:
    """Be one client. A fifth of them leave in the middle, every other one of those with its connection only."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        leaves = n % 5 == 0
        call = stub.Generate(request(n, max_tokens=500) if leaves else request(n), timeout=100)
        items = aiter(call)
        if leaves:
            for _ in range(1 + n // 5 % 5):
                await anext(items)
            if n % 2:
                call.cancel()
            return
        last = [item async for item in items][-1]
        assert last.WhichOneof("item") == "result"


def anonymous_mib(service: Service) -> float:
    """Return the resident memory that is not of files."""
    memory = psutil.Process(service.pid).memory_info()
    return float(memory.rss - memory.shared) / 2**20


def descriptors(service: Service) -> int:
    return int(psutil.Process(service.pid).num_fds())


async def soak(paceline: Paceline, sessions: range) -> dict[str, list[float]]:
    """Run the sessions and return the memory of each service as each of them ended."""
    resident: dict[str, list[float]] = {name: [] for name in paceline.services}
    waiting = iter(sessions)

    async def client() -> None:
        for n in waiting:
            await session(paceline.coordinators[n // 6 % 2].address, n)
            for name, service in paceline.services.items():
                resident[name].append(anonymous_mib(service))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return resident


def need_all_of_the_pool(paceline: Paceline) -> None:
    """Be admitted at the target, through each coordinator, with a session that fits only if nearly all of it is free.

    One and not several that fill it together: ranges are in one piece, and whoever still ends when the first of several
    comes pushes it to where there is no room beside it. Sooner than an idle session lends its range.
    """
    for coordinator in paceline.coordinators:
        with coordinator.connected() as stub, contextlib.ExitStack() as stack:
            call = stub.Generate(request(0, gamma=3, max_tokens=POOL_TOKENS), timeout=40)
            stack.callback(call.cancel)
            next(iter(call))


async def test_six_hundred_sessions_leave_memory_and_descriptors_as_they_were(paceline: Paceline) -> None:
    await soak(paceline, range(16))
    before = {name: descriptors(service) for name, service in paceline.services.items()}
    resident = await soak(paceline, range(SESSIONS))
    growth = {}
    for name, mib in resident.items():
        early, late = statistics.fmean(mib[EARLY]), statistics.fmean(mib[LATE])
        growth[name] = late - early
        print(f"{name}: {mib[0]:.1f} MiB at first, {early:.2f} early, {late:.2f} late, {late - early:+.2f}")
    await asyncio.to_thread(need_all_of_the_pool, paceline)
    after = {name: descriptors(service) for name, service in paceline.services.items()}
    print(f"descriptors: {before} {after}")
    assert {name: mib for name, mib in growth.items() if mib > MOST_GROWTH_MIB[name.split()[0]]} == {}
    assert {name: n for name, n in after.items() if n > before[name] + 2} == {}
