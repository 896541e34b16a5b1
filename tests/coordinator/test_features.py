"""The target's hidden states on their way to the draft: what is asked for, what is sent, and what is never sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.v1 import worker_pb2
from services.common.specdec.types import MAX_FEATURE_BYTES, MAX_GAMMA
from services.coordinator.clients.features import FeatureRelay
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import TargetScript

WINDOW = 16
SPEC = worker_pb2.FeatureSpec(layers=[1, 2], width=2, window=WINDOW)
FED = worker_pb2.ModelInfo(features=SPEC)


def relay(info: worker_pb2.ModelInfo | None = FED, kept: worker_pb2.FeatureSpec = SPEC) -> FeatureRelay:
    return FeatureRelay(lambda: info, kept)


def told(start: int, end: int) -> worker_pb2.Features:
    """Features that say which position they are of."""
    return worker_pb2.Features(start=start, data=b"".join(i.to_bytes(4, "little") for i in range(start, end)))


def positions(features: worker_pb2.Features | None) -> list[int]:
    if features is None:
        return []
    data = features.data
    found = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    assert found == list(range(features.start, features.start + len(found)))
    return found


def test_nothing_is_asked_for_where_no_draft_is_fed() -> None:
    for info in (None, worker_pb2.ModelInfo()):
        assert relay(info).ask_from(10) is None
        assert relay(info).take(10) is None


def test_a_draft_gets_its_window_and_then_what_is_new() -> None:
    way = relay()
    assert way.ask_from(40) == 40 - WINDOW
    # With three drafts: the first one was kept, and a token put in the place of the second.
    way.put(told(24, 43))
    assert positions(way.take(42)) == list(range(24, 41))
    assert way.known_end == 41
    assert way.ask_from(42) == 41
    way.put(told(41, 45))
    # All three were kept, and a bonus token came.
    assert positions(way.take(46)) == list(range(41, 45))
    assert way.take(46) is None


def test_a_short_prompt_is_asked_for_from_its_beginning() -> None:
    way = relay()
    assert way.ask_from(5) == 0
    way.put(told(0, 5))
    assert positions(way.take(6)) == [0, 1, 2, 3, 4]


def test_rounds_without_drafts_ask_for_little_and_keep_what_came() -> None:
    way = relay()
    way.put(told(way.ask_from(40) or 0, 40))
    assert positions(way.take(41)) == list(range(24, 40))
    for n in range(41, 51):
        assert way.ask_from(n) == n - 1
        way.put(told(n - 1, n))
    assert positions(way.take(51)) == list(range(40, 50))


def test_what_was_drafted_and_rejected_is_asked_for_again() -> None:
    way = relay()
    way.known_end = 39
    way.put(told(39, 44))
    assert way.ask_from(41) == 40


def test_a_draft_elsewhere_begins_with_a_whole_window() -> None:
    way = relay()
    way.put(told(way.ask_from(40) or 0, 40))
    way.take(41)
    way.put(told(way.ask_from(41) or 0, 41))
    # Another worker: a few positions are no window.
    way.known_end = None
    assert way.take(42) is None
    assert way.ask_from(42) == 42 - WINDOW
    way.put(told(26, 42))
    assert positions(way.take(43)) == list(range(26, 42))


def test_a_draft_that_was_left_far_behind_begins_anew() -> None:
    way = relay()
    way.known_end = 5
    assert way.ask_from(60) == 60 - WINDOW
    way.put(told(44, 60))
    assert positions(way.take(61)) == list(range(44, 60))


def test_bytes_that_are_no_features_are_dropped() -> None:
    way = relay()
    way.put(worker_pb2.Features(start=0, data=b"abc"))
    assert way.take(10) is None


def test_a_draft_that_is_never_asked_makes_nothing_pile_up() -> None:
    for known_end in (None, 20, 41):
        way = relay()
        way.known_end = known_end
        for n in range(42, 400):
            start = way.ask_from(n)
            assert start is not None
            way.put(told(start, n + 3))
        assert positions(way.take(400)) == list(range(400 - 1 - WINDOW, 399))


def test_of_a_target_that_keeps_other_states_none_are_asked_for() -> None:
    """In a roll-out a request goes on with the target that it began with, and the draft fits the new one."""
    for kept in (worker_pb2.FeatureSpec(), worker_pb2.FeatureSpec(layers=[1], width=1)):
        way = relay(kept=kept)
        assert way.ask_from(40) is None
        way.put(told(0, 40))
        assert way.take(40) is None


def test_a_draft_that_says_nothing_of_its_states_is_given_none() -> None:
    way = relay(worker_pb2.ModelInfo(features=worker_pb2.FeatureSpec()), worker_pb2.FeatureSpec())
    assert way.ask_from(40) is None
    way.put(told(0, 40))
    assert way.take(40) is None


def test_no_more_is_asked_for_than_a_message_holds_whatever_the_draft_says() -> None:
    spec = worker_pb2.FeatureSpec(layers=[1, 2], width=2**14, window=10**6)
    for most_bytes in (MAX_FEATURE_BYTES, 2**22):
        way = FeatureRelay(lambda: worker_pb2.ModelInfo(features=spec), spec, most_bytes)
        start = way.ask_from(5_000)
        assert start is not None
        assert 5_000 + MAX_GAMMA - start <= max(MAX_GAMMA, most_bytes // (2 * spec.width))


@dataclass
class Watching(TargetScript):
    """Notes for which requests hidden states were asked for."""

    wanted: list[bool] = field(default_factory=list)

    def recall(self, tokens: list[int], request: Any) -> None:
        self.wanted.append(request.HasField("features_from"))


@contextlib.asynccontextmanager
async def fed_cluster(script: Watching) -> AsyncIterator[Cluster]:
    """Scripted services whose draft is fed with the target's states."""
    async with scripted_cluster(close_law(distance=0.5, seed=2), target=script) as cluster:
        for worker in (cluster.target, cluster.draft):
            worker.info.features.CopyFrom(SPEC)
        workers = cluster.coordinator._workers
        while not (workers.draft and workers.draft.HasField("features")):
            workers.recheck()
            await asyncio.sleep(0.05)
        yield cluster


async def test_a_request_without_drafts_asks_for_none() -> None:
    script = Watching()
    async with fed_cluster(script) as cluster:
        for gamma, wanted in ((3, True), (0, False)):
            script.wanted.clear()
            await cluster.generate([0, 1], gamma=gamma)
            assert set(script.wanted) == {wanted}


class Resting:
    """Drafts in two rounds, rests for four, and is ready for a draft again in the last of those."""

    stop_below = 0.0

    def __init__(self, speculation: object) -> None:
        self._round = -1

    @property
    def primes(self) -> bool:
        return self._round % 6 in (0, 1, 5)

    def choose(self, room: int) -> int:
        self._round += 1
        return min(room, 2) if self._round % 6 < 2 else 0

    def observe(self, done: object) -> None:
        """Learn nothing."""


async def test_a_round_of_a_request_that_rests_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.coordinator.service.AdaptiveGamma", Resting)
    script = Watching()
    async with fed_cluster(script) as cluster:
        await cluster.generate([0, 1], max_tokens=60, seed=None)
    assert script.wanted[:18] == [True, True, False, False, False, True] * 3
