"""Rows in part over real gRPC: the law is p where draws fall beyond what came; the tokens are those of whole rows."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.v1 import worker_pb2
from services.common.specdec.partial import AnyRow, Ids, PartialRow
from services.common.specdec.sampling import draw
from services.common.specdec.types import Row
from tests.exactness.collect import MODES, PROMPT, collect, law_for
from tests.exactness.test_overlap import SLOW_TARGET, Unsteady, answers_of, replies, rounds_of
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import Law, close_law, far
from tests.support.planted import PLAIN
from tests.support.scripts import DraftScript, TargetScript, Turn
from tests.support.statistics import SIGNIFICANCE, Answers, power, verdicts

IN_PART = TargetScript(in_part=True)
LAW = law_for(3)
REQUESTS = 60
RULES = {"token": worker_pb2.VERIFICATION_TOKEN, "coupled": worker_pb2.VERIFICATION_COUPLED}
# What falls beyond is seen only where there is enough of it.
WIDE = close_law(distance=0.6, spread=0.7, seed=8, vocab_size=9)


class DraftsFromTwo(DraftScript):
    """Drafts from the two likeliest tokens of q alone, and says so: a narrow support, and much of p outside."""

    def sampled(self, turn: Turn) -> Row:
        q = turn.q.dense(turn.law.vocab_size)
        ids = np.sort(np.argsort(-q)[:2])
        return Row((q[ids] / q[ids].sum()).astype(np.float32), ids.astype(np.uint32))

    def reported(self, turn: Turn) -> Row:
        return self.sampled(turn)


def check(answers: Answers, law: Law, mode: str) -> None:
    found = list(verdicts(answers, law.p(MODES[mode])))
    print("", *found, sep="\n")
    assert not [str(verdict) for verdict in found if not verdict.passed]


async def answer(cluster: Cluster, **fields: Any) -> Reply:
    return await cluster.generate(PROMPT, gamma=3, max_tokens=60, **fields)


@pytest.mark.parametrize(("mode", "head", "requests"), [("plain", 1, 60), ("processed", 0, 110)])
async def test_law(mode: str, head: int, requests: int) -> None:
    law = far(LAW) if head else LAW
    async with scripted_cluster(law, draft=DraftsFromTwo(), target=IN_PART, row_head=head) as cluster:
        answers = await collect(cluster, gamma=3, params=MODES[mode], requests=requests)
        one = await answer(cluster, params=MODES[mode])
    assert sum(row.fetched_rows for row in one.result.speculation.per_round) > 3
    p = law.p(MODES[mode]).reshape(-1, law.vocab_size)
    assert power(answers.by_context(law.vocab_size, answers.offsets == 0), p, shift=0.07) > 0.99
    check(answers, law, mode)


def draw_from_what_came(row: AnyRow, support: Ids, u: float) -> int | None:
    """Draw, and take the last of what is known for all that falls beyond: no row is ever fetched."""
    if not isinstance(row, PartialRow):
        return draw(row, support, u)
    return draw(PartialRow(row.support, row.weights, row.head_ids, row.head_weights, 0.0), support, u)


async def test_a_tail_that_is_never_drawn_from_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.common.specdec.acceptance.draw", draw_from_what_came)
    async with scripted_cluster(LAW, target=IN_PART, row_head=1) as cluster:
        answers = await collect(cluster, gamma=3, params=PLAIN, requests=15)
    assert min(verdict.p_value for verdict in verdicts(answers, LAW.p(PLAIN))) < SIGNIFICANCE


async def test_law_of_a_larger_vocabulary() -> None:
    async with scripted_cluster(WIDE, draft=DraftsFromTwo(), target=IN_PART, row_head=1) as cluster:
        answers = await collect(cluster, gamma=2, params=PLAIN, requests=REQUESTS)
        one = await answer(cluster)
    assert sum(row.fetched_rows for row in one.result.speculation.per_round) > 3
    check(answers, WIDE, "plain")


async def test_law_with_drafting_that_runs_ahead() -> None:
    """The last row was asked for over no support, and then tests the draft that ran ahead."""
    target = TargetScript(in_part=True, late_s=SLOW_TARGET.late_s)
    async with scripted_cluster(LAW, draft=Unsteady(), target=target, row_head=1, overlap="on") as cluster:
        got = await replies(cluster, gamma=1, requests=REQUESTS)
    tested = [row for row in rounds_of(got) if row.tested > row.gamma]
    assert sum(row.fetched_rows > 0 for row in tested) > 50
    check(answers_of(got), LAW, "plain")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", [DraftScript(), DraftsFromTwo()], ids=["wide q", "narrow q"])
async def test_tokens_are_those_of_whole_rows(draft: DraftScript, rule: str) -> None:
    fields = {"verification": RULES[rule]}
    tokens, fetched = [], []
    for settings in ({"partial_rows": False}, {"row_head": 0}, {"row_head": 1}, {"row_head": 2}, {}):
        async with scripted_cluster(WIDE, draft=draft, target=IN_PART, **settings) as cluster:
            answers = [await answer(cluster, seed=seed, **fields) for seed in range(3)]
        tokens.append([each.tokens for each in answers])
        fetched.append(sum(row.fetched_rows for each in answers for row in each.result.speculation.per_round))
    assert all(each == tokens[0] for each in tokens)
    if rule == "coupled":
        assert fetched == [0] * 5, "a row comes with its winner"
    else:
        assert fetched[0] == fetched[4] == 0, "whole rows, and heads that hold them whole"
        assert fetched[1] > fetched[2] > fetched[3] > 0


async def test_whole_rows_that_a_message_has_no_room_for_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for room in (4, 3):
        monkeypatch.setattr("services.coordinator.clients.target._WIDE_BYTES", 0)
        monkeypatch.setattr("services.coordinator.service.whole_rows", lambda *_, room=room: room)
        async with scripted_cluster(WIDE, target=IN_PART, row_head=0) as cluster:
            one = await answer(cluster, seed=2)
        tokens.append(one.tokens)
        rows = one.result.speculation.per_round
        # Of the rounds with three drafts, one for each row that was reached.
        assert [row.fetched_rows for row in rows if row.proposed == 3] == [
            0 if room == 4 else row.tested + (row.accepted == 3) for row in rows if row.proposed == 3
        ]
    assert tokens[0] == tokens[1]


class KeepsFetchesWaiting(TargetScript):
    """Does not answer the first fetch: tells of it."""

    def __init__(self) -> None:
        super().__init__(in_part=True)
        self.asked = asyncio.Event()

    def replies(self, request: Any, reply: Any) -> tuple[Any, ...]:
        if request.HasField("fetch") and not self.asked.is_set():
            self.asked.set()
            return ()
        return (reply,)


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "killed"])
async def test_a_fresh_worker_answers_a_fetch(silent: bool) -> None:
    async with scripted_cluster(WIDE, target=IN_PART, row_head=1) as cluster:
        undisturbed = await answer(cluster, seed=4)
    timeout = {"verify_timeout_s": 3.0} if silent else {}
    script = KeepsFetchesWaiting()
    async with scripted_cluster(WIDE, target=script, row_head=1, spares=1, **timeout) as cluster:
        (spare,) = cluster.spare_targets
        spare.script = IN_PART
        running = asyncio.create_task(answer(cluster, seed=4))
        await script.asked.wait()
        await spare.serve()
        if not silent:
            await cluster.target.stop()
        disturbed = await running
        assert cluster.target.streams + spare.streams == 2
    assert disturbed.tokens == undisturbed.tokens
    rounds = [[row.fetched_rows for row in each.result.speculation.per_round] for each in (undisturbed, disturbed)]
    assert rounds[0] == rounds[1]
