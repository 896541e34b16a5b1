"""A worker's side of a stream: requests read ahead but not without bound, sessions given back while they are idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.v1 import draft_pb2, worker_pb2
from services.common.rpc.codec import encode_sampling
from services.common.rpc.worker import READ_AHEAD, Inbox, StreamSession, open_session
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import SamplingParams, VerificationMode

FOREVER_S = 600.0


class Endless:
    """A coordinator that sends and sends."""

    def __init__(self) -> None:
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[draft_pb2.ProposeRequest]:
        while True:
            self.sent += 1
            yield draft_pb2.ProposeRequest(round=self.sent)
            await asyncio.sleep(0)


class Session:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_requests_are_read_ahead_but_not_without_bound() -> None:
    requests = Endless()
    async with Inbox(aiter(requests), FOREVER_S, lambda: None) as inbox:
        await settle()
        assert requests.sent == READ_AHEAD
        taken = [(await anext(inbox))[0].round for _ in range(3)]
        await settle()
        assert requests.sent == READ_AHEAD + 3
        assert not inbox.is_empty
    assert taken == [1, 2, 3]
    await settle()
    assert requests.sent <= READ_AHEAD + 4, "nobody reads on"


async def test_the_end_of_a_stream_ends_the_inbox() -> None:
    async def two() -> AsyncIterator[draft_pb2.ProposeRequest]:
        for n in range(2):
            yield draft_pb2.ProposeRequest(round=n)

    async with Inbox(two(), FOREVER_S, lambda: None) as inbox:
        assert [request.round async for request, _ in inbox] == [0, 1]


async def test_the_end_of_a_stream_is_no_request_that_overtakes_the_last() -> None:
    async def one() -> AsyncIterator[draft_pb2.ProposeRequest]:
        yield draft_pb2.ProposeRequest(round=1)

    async with Inbox(one(), FOREVER_S, lambda: None) as inbox:
        await anext(inbox)
        await settle()
        assert inbox.is_empty
        with pytest.raises(StopAsyncIteration):
            await anext(inbox)


async def test_an_idle_stream_is_told_once_and_goes_on() -> None:
    idle: list[str] = []
    more = asyncio.Event()

    async def one_then_another() -> AsyncIterator[draft_pb2.ProposeRequest]:
        yield draft_pb2.ProposeRequest(round=1)
        await more.wait()
        yield draft_pb2.ProposeRequest(round=2)

    def on_idle() -> None:
        idle.append("idle")
        more.set()

    async with Inbox(one_then_another(), 0.02, on_idle) as inbox:
        assert [request.round async for request, _ in inbox] == [1, 2]
    assert idle == ["idle"]


async def test_a_session_that_was_given_back_is_opened_again_as_it_began() -> None:
    opened: list[tuple[worker_pb2.SessionStart, Session]] = []

    async def open_session(start: worker_pb2.SessionStart) -> Session:
        opened.append((start, Session()))
        return opened[-1][1]

    lease = StreamSession(open_session)
    start = worker_pb2.SessionStart(seed=7)
    first = await lease.session(draft_pb2.ProposeRequest(start=start))
    assert await lease.session(draft_pb2.ProposeRequest()) is first
    lease.close()
    lease.close()
    assert first.closed == 1
    assert await lease.session(draft_pb2.ProposeRequest()) is not first
    assert [seen for seen, _ in opened] == [start, start]


async def test_a_first_request_that_opens_nothing_is_refused() -> None:
    async def open_session(start: worker_pb2.SessionStart) -> Session:
        raise AssertionError(start)

    with pytest.raises(InvalidFieldError, match="start is 'unset': must be set in the first message of a stream"):
        await StreamSession(open_session).session(draft_pb2.ProposeRequest())


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        (worker_pb2.VERIFICATION_UNSPECIFIED, VerificationMode.TOKEN),
        (worker_pb2.VERIFICATION_TOKEN, VerificationMode.TOKEN),
        (worker_pb2.VERIFICATION_COUPLED, VerificationMode.COUPLED),
    ],
)
def test_a_session_is_told_its_rule(named: worker_pb2.Verification.ValueType, rule: VerificationMode) -> None:
    start = worker_pb2.SessionStart(sampling=encode_sampling(SamplingParams(0.5)), verification=named)
    assert open_session(start, worker_pb2.ModelIdentity()) == (SamplingParams(0.5), rule)


def test_a_rule_that_there_is_not_is_refused_by_name() -> None:
    start = worker_pb2.SessionStart(sampling=encode_sampling(SamplingParams()), verification=9)  # type: ignore[arg-type]
    told = r"start.verification is 9: must be VERIFICATION_TOKEN \(1\) or VERIFICATION_COUPLED \(2\)"
    with pytest.raises(InvalidFieldError, match=told):
        open_session(start, worker_pb2.ModelIdentity())
