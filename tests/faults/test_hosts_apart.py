"""Coordinator, two draft and two target workers on hosts of their own, whose cables are cut and mended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.faults.conftest import OFFLINE
from tests.faults.load import STREAMS, check_same, lost, name, requests, under_load
from tests.support.cluster import Reply
from tests.support.hosts import Host, Hosts, missing
from tests.support.processes import GREEDY, Coordinator, Processes

_WHY_NOT = missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]
PLAIN = worker_pb2.SamplingParams(temperature=1.0)
LENGTH = 200
KEEPALIVE_S = 1.0
# A silent peer is found within twice the interval. Then comes a back-off of the coordinator, at most a second, and the
# rest is for a loaded machine: with the interval that is the default this takes 20 s.
FOUND_S = 2 * KEEPALIVE_S
BOUND_S = FOUND_S + 1.0 + 2.0
KEEPALIVE = ("--keepalive-s", f"{KEEPALIVE_S:g}")
# 4,096 tokens of 256 bytes: one session that may grow to 4,000 has the whole pool.
POOL = ("--dtype", "float32", "--kv-cache-memory", "1MiB", "--session-wait-s", "0.2", *KEEPALIVE)
WHOLE_POOL = 4_000


@dataclass(frozen=True)
class Apart:
    """Every service on a host of its own; `elsewhere` is a second coordinator, on this machine.

    Attributes:
        hosts: Of the targets, the drafts and the coordinator, by the worker's name or `coordinator`.
    """

    hosts: dict[str, Host]
    coordinator: Coordinator
    elsewhere: Coordinator


@pytest.fixture(scope="module")
def apart(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with Hosts() as network, Processes(tmp_path_factory.mktemp("logs"), OFFLINE) as run:
        hosts = {which: network.add() for which in ("target-1", "target-2", "draft-1", "draft-2", "coordinator")}

        def placed(which: str) -> tuple[str, ...]:
            return ("--worker-id", which, *POOL)

        targets = [
            run.target("--model", str(models / "target"), *placed(which), place=hosts[which].place)
            for which in ("target-1", "target-2")
        ]
        drafts = [
            run.draft("--drafter", "model", "--model", str(models / "draft"), *placed(which), place=hosts[which].place)
            for which in ("draft-1", "draft-2")
        ]
        for worker in (*targets, *drafts):
            worker.wait_until_serving()
        both = ("--target", name(targets), "--draft", name(drafts), "--target-retry-s", "60", *KEEPALIVE)
        coordinator = run.coordinator(targets[0], drafts[0], *both, place=hosts["coordinator"].place)
        elsewhere = run.coordinator(targets[0], drafts[0], *both)
        yield Apart(hosts, coordinator, elsewhere)


@pytest.fixture(scope="module")
def sampled(apart: Apart) -> list[Reply]:
    """The undisturbed answers."""
    return under_load(apart.coordinator, requests(sampling=PLAIN, max_tokens=LENGTH))


@pytest.fixture(scope="module")
def greedy(apart: Apart) -> list[Reply]:
    """The undisturbed answers."""
    return under_load(apart.coordinator, requests(sampling=GREEDY, max_tokens=LENGTH))


@contextlib.contextmanager
def mended(host: Host) -> Iterator[None]:
    try:
        yield
    finally:
        host.mend()


def until_used(coordinator: Coordinator, which: str, worker: str) -> None:
    """Wait until a worker has sessions again."""
    give_up_s = time.monotonic() + 20
    while True:
        reply = coordinator.generate(text="Once upon a time", gamma=1, max_tokens=4)
        if worker in {getattr(row, which).worker_id for row in reply.result.speculation.per_round}:
            return
        assert time.monotonic() < give_up_s, f"{worker} is not used again"


def test_a_target_that_is_cut_off_loses_no_stream_and_is_used_again(apart: Apart, sampled: list[Reply]) -> None:
    before = lost(apart.coordinator, "target")
    host = apart.hosts["target-1"]
    with mended(host):
        replies = under_load(apart.coordinator, requests(sampling=PLAIN, max_tokens=LENGTH), host.cut)
    check_same(replies, sampled)
    # Some had their session there, and found another within the bound.
    cut = [reply for reply in replies if "target-1" in {row.target.worker_id for row in rounds(reply)}]
    assert lost(apart.coordinator, "target") - before >= len(cut) > 0
    waits = [max(row.total_ms for row in rounds(reply)) / 1e3 for reply in cut]
    print(f"waits for another target, s: {[round(wait, 2) for wait in waits]}")
    assert max(waits) < BOUND_S
    until_used(apart.coordinator, "target", "target-1")


def rounds(reply: Reply) -> Sequence[pb.RoundStats]:
    return reply.result.speculation.per_round


def test_a_draft_that_is_cut_off_costs_drafts_for_a_while(apart: Apart, greedy: list[Reply]) -> None:
    """Its time limit is a minute here: it is keepalive that ends the wait."""
    before = lost(apart.coordinator, "draft")
    host = apart.hosts["draft-1"]
    with mended(host):
        replies = under_load(apart.coordinator, requests(sampling=GREEDY, max_tokens=LENGTH), host.cut)
    check_same(replies, greedy)
    assert lost(apart.coordinator, "draft") > before
    waits = [max(row.draft_ms for row in rounds(reply)) / 1e3 for reply in replies]
    print(f"longest waits for drafts, s: {[round(wait, 2) for wait in waits]}")
    assert max(waits) < BOUND_S
    until_used(apart.coordinator, "draft", "draft-1")


def test_the_sessions_of_a_coordinator_that_is_cut_off_are_freed(apart: Apart, sampled: list[Reply]) -> None:
    """It holds the whole pool of one target; elsewhere two requests are admitted when both pools are free."""
    host = apart.hosts["coordinator"]
    whole = requests(sampling=PLAIN, max_tokens=WHOLE_POOL, gamma=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mended(host))
        held = stack.enter_context(apart.coordinator.connected()).Generate(whole[0], timeout=100)
        stack.callback(held.cancel)
        next(iter(held))
        elsewhere = stack.enter_context(apart.elsewhere.connected())
        host.cut()
        cut_s = time.monotonic()
        for request in whole[1:3]:
            call = elsewhere.Generate(request, timeout=100)
            stack.callback(call.cancel)
            next(iter(call))
        freed_s = time.monotonic() - cut_s
    print(f"freed after {freed_s:.2f} s")
    # Before that there was no room.
    assert "RESOURCE_EXHAUSTED" in apart.elsewhere.log
    assert freed_s < BOUND_S
    # And the coordinator serves again as soon as it can be reached.
    apart.coordinator.wait_until_serving()
    check_same(under_load(apart.coordinator, requests(sampling=PLAIN, max_tokens=LENGTH)[:2]), sampled[:2])
    assert len(sampled) == STREAMS
