"""The draft is slow, broken, absent, different or wrong: the text goes on, and nothing waits for it twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import draft_pb2
from services.common.rpc.codec import encode_row
from services.common.specdec.types import Row
from tests.faults.waiting import recheck, until
from tests.support.cluster import Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import NEVER, DraftScript, TargetScript

PROMPT = [0, 1]
LAW = close_law(distance=0.5, seed=2)
WAIT_S = 2.5


def rows(reply: Reply) -> list[pb.RoundStats]:
    return list(reply.result.speculation.per_round)


def drafted(reply: Reply) -> list[bool]:
    """Return which rounds had drafts, of those that could have."""
    return [row.proposed > 0 for row in rows(reply) if row.gamma]


async def test_another_tokenizer_is_served_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_cluster(LAW) as cluster:
        cluster.draft.info.tokenizer_fingerprint = "of-another-tokenizer"
        recheck(cluster)
        await until(lambda: "of-another-tokenizer" in caplog.text, "the difference is logged")
        said = caplog.text
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
        # It is asked again: once it fits, it is used.
        cluster.draft.info.tokenizer_fingerprint = cluster.target.info.tokenizer_fingerprint
        recheck(cluster)
        await until(lambda: cluster.coordinator._workers.draft is not None, "the draft is used again")
        again = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
    assert cluster.target.info.tokenizer_fingerprint in said
    assert "serving with gamma 0" in said
    assert len(reply.tokens) == 12
    assert drafted(reply) == [False] * 11
    assert reply.result.speculation.degraded_rounds == 11
    assert all(drafted(again))


async def test_another_vocabulary_size_is_served_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_cluster(LAW) as cluster:
        cluster.draft.info.vocab_size = 5
        recheck(cluster)
        await until(lambda: cluster.coordinator._workers.draft is None, "the draft is not used")
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
    assert drafted(reply) == [False] * 11


async def test_no_draft_worker_at_all() -> None:
    async with scripted_cluster(LAW, draft_address="", wait_for_draft=False) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
    assert len(reply.tokens) == 12
    assert drafted(reply) == [False] * 11
    assert reply.result.speculation.degraded_rounds == 11


async def test_a_draft_worker_that_is_not_there() -> None:
    async with scripted_cluster(LAW, wait_for_draft=False) as cluster:
        await cluster.draft.stop()
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
    assert len(reply.tokens) == 12
    assert not any(drafted(reply))


@pytest.mark.parametrize("request_number", [1, 2, 5])
async def test_a_stream_that_breaks_is_opened_again(request_number: int) -> None:
    # The target takes its time, so that the rounds outlast the back-off.
    target = TargetScript(late_s=0.01)
    async with scripted_cluster(LAW, draft=DraftScript(die_on={request_number}), target=target) as cluster:
        reply = await cluster.generate(PROMPT, gamma=2, max_tokens=90, seed=3)
    had = drafted(reply)
    assert len(reply.tokens) == 90
    lost = had.index(False)
    assert lost == request_number - 1
    assert rows(reply)[lost].degraded
    assert had[-1]
    # One break costs the rounds of one back-off.
    back = had.index(True, lost)
    assert all(had[back:])
    assert rows(reply)[back - 1].start_ms - rows(reply)[lost].start_ms < 5000


async def test_a_worker_that_goes_and_comes_back() -> None:
    async with scripted_cluster(LAW, target=TargetScript(late_s=0.01)) as cluster:
        answer = asyncio.create_task(cluster.generate(PROMPT, gamma=2, max_tokens=4000, seed=3))
        await until(lambda: cluster.draft.requests >= 5, "five proposals")
        await cluster.draft.stop()
        gone, rounds = cluster.draft.requests, cluster.target.requests
        await until(lambda: cluster.target.requests >= rounds + 10, "ten rounds without it")
        assert cluster.draft.requests == gone
        await cluster.draft.start()
        await until(lambda: cluster.draft.requests >= gone + 5, "five more proposals")
        assert not answer.done()
        assert cluster.target.streams == 1
        answer.cancel()
        await asyncio.wait({answer})


async def test_a_stalled_worker_costs_one_wait() -> None:
    draft = DraftScript(stall_on=range(3, 1000))
    async with scripted_cluster(LAW, draft=draft, draft_timeout_s=WAIT_S) as cluster:
        reply = await cluster.generate(PROMPT, gamma=2, max_tokens=60, seed=3)
    waits = [row for row in rows(reply) if row.draft_ms >= WAIT_S * 1e3]
    assert len(reply.tokens) == 60
    assert drafted(reply) == [True] * 2 + [False] * (len(drafted(reply)) - 2)
    assert [row.index for row in waits] == [2]
    assert waits[0].draft_ms < 10 * WAIT_S * 1e3
    assert reply.result.speculation.degraded_rounds == len(drafted(reply)) - 2


async def test_a_worker_that_answers_late_is_used_again() -> None:
    """One pause, longer than a round waits: then drafting goes on by itself, on the same stream."""
    draft = DraftScript(late_at=0, late_s=WAIT_S + 1)
    target = TargetScript(late_s=0.01)
    async with scripted_cluster(LAW, draft=draft, target=target, draft_timeout_s=WAIT_S) as cluster:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, gamma=2, max_tokens=200, seed=3))
            await until(lambda: cluster.draft.requests == 1, "it is asked")
            cluster.draft.script = DraftScript()
        had = drafted(answer.result())
        streams = cluster.draft.streams
    back = had.index(True)
    assert had == [False] * back + [True] * (len(had) - back)
    assert streams == 1
    assert sum(row.draft_ms >= WAIT_S * 1e3 for row in rows(answer.result())) == 1


@pytest.mark.parametrize("come", [1, 2])
async def test_drafts_that_have_come_are_used_when_the_rest_is_late_and_waited_for_once(come: int) -> None:
    draft = DraftScript(late_at=come, late_s=NEVER)
    async with scripted_cluster(LAW, draft=draft, draft_timeout_s=WAIT_S) as cluster:
        reply = await cluster.generate(PROMPT, gamma=4, max_tokens=30, seed=3)
    first, *others = rows(reply)
    assert first.proposed == come
    assert first.draft_ms >= WAIT_S * 1e3
    assert all(row.degraded for row in (first, *others) if row.gamma > come)
    assert all(row.proposed == 0 for row in others)
    assert sum(row.draft_ms for row in others) < WAIT_S * 1e3


async def test_a_worker_that_pauses_between_two_drafts_is_used_again() -> None:
    draft = DraftScript(late_at=1, late_s=WAIT_S + 0.5)
    target = TargetScript(late_s=0.01)
    async with scripted_cluster(LAW, draft=draft, target=target, draft_timeout_s=WAIT_S) as cluster:
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(cluster.generate(PROMPT, gamma=2, max_tokens=200, seed=3))
            await until(lambda: cluster.draft.requests == 1, "it is asked")
            cluster.draft.script = DraftScript()
        streams = cluster.draft.streams
    had = drafted(answer.result())
    back = had.index(True, 1)
    assert had == [True] + [False] * (back - 1) + [True] * (len(had) - back)
    assert streams == 1


class Sends(DraftScript):
    """A worker that sends something else than it should."""

    def __init__(self, make: Callable[[Any, Any], Sequence[Any]]) -> None:
        super().__init__()
        self._make = make

    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        return self._make(request, reply)


def draft_token(token: int, row: Row) -> draft_pb2.DraftToken:
    return draft_pb2.DraftToken(token=token, q=encode_row(row))


def too_many(_: Any, reply: Any) -> Sequence[Any]:
    """Every draft three times over."""
    reply.drafts.extend([*reply.drafts, *reply.drafts])
    return (reply,)


def stale_first(request: Any, reply: Any) -> Sequence[Any]:
    """An answer to another round, later and then older, in front."""
    others = [n for n in (request.round + 1, request.round - 1) if n >= 0]
    stale = [draft_pb2.ProposeResponse(round=n, done=True, drafts=[draft_token(3, Row.point_mass(3))]) for n in others]
    return (*stale, reply)


async def test_more_drafts_than_were_asked_for_and_stale_rounds_are_dropped() -> None:
    answers = []
    for script in (DraftScript(), Sends(stale_first), Sends(too_many)):
        async with scripted_cluster(LAW, draft=script) as cluster:
            answers.append(await cluster.generate(PROMPT, gamma=2, max_tokens=30, seed=8))
    for answer in answers:
        assert len(answer.tokens) == 30
        assert all(row.proposed <= row.gamma for row in rows(answer))
    assert answers[1].tokens == answers[0].tokens
    assert answers[1].result.speculation.degraded_rounds == 0
    # Its cache is not what the coordinator thinks it is; the law does not depend on that.
    assert answers[2].tokens[:2] == answers[0].tokens[:2]


@pytest.mark.parametrize("token", [4, 2**31, 2**32 - 1])
@pytest.mark.parametrize("sparse", [False, True])
async def test_a_token_outside_the_vocabulary_is_no_draft(token: int, sparse: bool) -> None:
    def wrong(_: Any, reply: Any) -> Sequence[Any]:
        for at, draft in enumerate(reply.drafts):
            if at == 1:
                draft.token = token
                if sparse:
                    draft.q.CopyFrom(encode_row(Row.point_mass(token)))
        return (reply,)

    async with scripted_cluster(LAW, draft=Sends(wrong)) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=30, seed=8)
    assert len(reply.tokens) == 30
    assert max(reply.tokens) < 4
    assert {row.proposed for row in rows(reply) if row.gamma} == {1}
    assert all(row.degraded for row in rows(reply) if row.gamma > 1)


def never_done(_: Any, reply: Any) -> Sequence[Any]:
    reply.done = False
    return (reply,)


def empty(request: Any, _: Any) -> Sequence[Any]:
    return (draft_pb2.ProposeResponse(round=request.round, done=True),)


def forgetful(request: Any, _: Any) -> Sequence[Any]:
    """Always: I know nothing."""
    return (draft_pb2.ProposeResponse(round=request.round, known_length=0, done=True),)


def boundless(request: Any, reply: Any) -> Sequence[Any]:
    """A row per token that is as large as a message may be."""
    for draft in reply.drafts:
        draft.q.dense = bytes(8 * 2**20)
    return (reply,)


@pytest.mark.parametrize("make", [never_done, empty, forgetful, boundless], ids=lambda make: make.__name__)
async def test_nonsense_costs_time_only(make: Callable[[Any, Any], Sequence[Any]]) -> None:
    async with scripted_cluster(LAW, draft=Sends(make), draft_timeout_s=0.05) as cluster:
        reply = await cluster.generate(PROMPT, gamma=2, max_tokens=12, seed=8)
    assert len(reply.tokens) == 12
    assert all(token < 4 for token in reply.tokens)


async def test_a_worker_that_forgot_is_told_again() -> None:
    """A draft whose cache is shorter than the coordinator thinks says so, and the same round has its drafts."""

    class Forgets(DraftScript):
        def recall(self, tokens: list[int], request: Any) -> None:
            if request.round == 4 and request.base_length > 1:
                del tokens[1:]

    answers = []
    for script in (DraftScript(), Forgets()):
        async with scripted_cluster(LAW, draft=script) as cluster:
            answers.append(await cluster.generate(PROMPT, gamma=2, max_tokens=30, seed=8))
            asked = cluster.draft.requests
    assert asked == len(drafted(answers[1])) + 1
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].result.speculation.degraded_rounds == 0
