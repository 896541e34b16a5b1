"""What reaches a worker's port without a coordinator before it: refused with field, value and limit, and alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from services.common.engine.engine import Engine
from services.common.rpc.codec import encode_sampling
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.specdec.types import MAX_GAMMA, SamplingParams
from services.draft_worker.ngram import NgramProposer
from services.draft_worker.service import DraftService, Serving
from services.target_worker.service import TargetService, serving
from services.target_worker.verifier import Verifier
from tests.support.engines import StartEngine, load
from tests.support.models import make_tiny_llama

BIGGEST = 2**32 - 1
NGRAM = worker_pb2.ModelIdentity(model_id="ngram")
IDLE_S = 1.5
MAX_STREAMS = 8
TARGET = "paceline.v1.TargetService"


@dataclass
class Workers:
    """Both workers on one port."""

    address: str
    channel: grpc.aio.Channel
    engine: Engine
    identity: worker_pb2.ModelIdentity

    def verify(self, prompt: int = 10, more: int = 90, **fields: Any) -> target_pb2.VerifyRequest:
        """Return a first request to the target."""
        return target_pb2.VerifyRequest(start=_start(self.identity, prompt, more), **fields)

    async def verified(self, *requests: target_pb2.VerifyRequest) -> list[target_pb2.VerifyResponse]:
        call = target_pb2_grpc.TargetServiceStub(self.channel).Verify(iter(requests))
        return [reply async for reply in call]

    async def proposed(self, *requests: draft_pb2.ProposeRequest) -> list[int]:
        call = draft_pb2_grpc.DraftServiceStub(self.channel).Propose(iter(requests))
        return [draft.token async for reply in call for draft in reply.drafts]


def _start(identity: worker_pb2.ModelIdentity, prompt: int, more: int) -> worker_pb2.SessionStart:
    sampling = encode_sampling(SamplingParams())
    return worker_pb2.SessionStart(sampling=sampling, prompt_length=prompt, max_new_tokens=more, identity=identity)


def propose(prompt: int = 10, more: int = 90, **fields: Any) -> draft_pb2.ProposeRequest:
    """Return a first request to the draft."""
    return draft_pb2.ProposeRequest(start=_start(NGRAM, prompt, more), **fields)


@pytest.fixture
async def workers(tmp_path: Path, start_engine: StartEngine) -> AsyncIterator[Workers]:
    loaded = load(make_tiny_llama(tmp_path / "target"))
    engine = await start_engine(loaded)
    server = Server(ServerSettings(), [TARGET])
    target, draft = TargetService(server, IDLE_S, MAX_STREAMS), DraftService(server, IDLE_S, MAX_STREAMS)
    served = serving(loaded, Verifier(engine), engine.context_length, "target")
    target.attach(served)
    draft.attach(Serving(NgramProposer(), worker_pb2.ModelInfo(identity=NGRAM)))
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server.grpc)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server.grpc)
    address = await server.listen()
    async with grpc.aio.insecure_channel(address) as channel:
        yield Workers(address, channel, engine, served.info.identity)
    await server.grpc.stop(None)


async def refused(asked: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await asked
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refusal.value.details() or ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tokens": [3]}, "rows is 0: must be 1 to 1, the number of tokens"),
        ({"tokens": [3], "rows": BIGGEST}, f"rows is {BIGGEST}: must be 1 to 1"),
        ({"tokens": [3] * 90, "rows": MAX_GAMMA + 2}, f"rows is {MAX_GAMMA + 2}: must be at most {MAX_GAMMA + 1}"),
        ({"tokens": [3], "rows": 1, "base_length": BIGGEST}, f"base_length + tokens is {BIGGEST + 1}: must be at most"),
        ({"tokens": [BIGGEST], "rows": 1}, f"tokens[0] is {BIGGEST}: must be 0 to 319"),
        ({"prompt": 0, "more": 0, "tokens": [3], "rows": 1}, "prompt_length + max_new_tokens is 0: must be 1 to 512"),
        ({"prompt": BIGGEST, "tokens": [3], "rows": 1}, f"prompt_length + max_new_tokens is {BIGGEST + 90}: must be 1"),
    ],
)
async def test_what_the_target_refuses(workers: Workers, fields: dict[str, Any], told: str) -> None:
    assert told in await refused(workers.verified(workers.verify(**fields)))
    assert len((await workers.verified(workers.verify(tokens=[3] * 70, rows=MAX_GAMMA + 1)))[0].rows) == MAX_GAMMA + 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"prompt": BIGGEST, "tokens": [3, 4, 3, 4], "gamma": BIGGEST},
            f"gamma is {BIGGEST}: must be at most {MAX_GAMMA}",
        ),
        ({"tokens": [3] * 101, "gamma": 1}, "base_length + tokens is 101: must be at most 100"),
        ({"tokens": [3], "stop_below": 1.5}, "stop_below is 1.5: must be 0 to 1, a probability"),
        ({"tokens": [3], "stop_below": float("nan")}, "stop_below is nan: must be 0 to 1, a probability"),
    ],
)
async def test_what_the_draft_refuses(workers: Workers, fields: dict[str, Any], told: str) -> None:
    assert told in await refused(workers.proposed(propose(**fields)))
    assert len(await workers.proposed(propose(tokens=[3] * 30, gamma=MAX_GAMMA))) == MAX_GAMMA


async def test_a_stream_opens_once(workers: Workers) -> None:
    first = workers.verify(tokens=[3], rows=1)
    assert "start is 'unset'" in await refused(workers.verified(target_pb2.VerifyRequest(tokens=[3], rows=1)))
    assert "start is 'set again'" in await refused(workers.verified(first, workers.verify(tokens=[3], rows=1)))
    assert "start is 'set again'" in await refused(workers.proposed(propose(), propose()))
    assert len(await workers.verified(first, target_pb2.VerifyRequest(base_length=1, tokens=[3], rows=1))) == 2


async def test_bytes_that_are_no_message_are_said_to_be_none(workers: Workers) -> None:
    raw: Any = workers.channel.stream_stream(f"/{TARGET}/Verify")
    good = workers.verify(tokens=[3], rows=1).SerializeToString()

    async def replies() -> list[bytes]:
        return [reply async for reply in raw(iter([good, b"\xff\xff\xff"]))]

    assert "a message of the stream cannot be decoded" in await refused(replies())


async def test_a_client_that_has_nothing_more_to_ask_gets_its_answer_whole(workers: Workers) -> None:
    for _ in range(5):
        assert await workers.proposed(propose(tokens=[3, 4, 5, 3, 4], gamma=3)) == [5, 3, 4]


async def test_streams_that_ask_nothing_are_bounded_in_number_and_in_time(workers: Workers) -> None:
    stub = draft_pb2_grpc.DraftServiceStub(workers.channel)
    silent = [stub.Propose() for _ in range(MAX_STREAMS + 3)]
    codes = [await call.code() for call in silent]
    assert sorted(code.name for code in codes) == ["DEADLINE_EXCEEDED"] * MAX_STREAMS + ["RESOURCE_EXHAUSTED"] * 3
    details = {await call.details() for call in silent}
    assert details == {
        "nothing was asked within 1.5 s (--idle-timeout-s)",
        f"{MAX_STREAMS} streams are open at this worker, the limit (--max-streams)",
    }
    assert await workers.proposed(propose(tokens=[3, 4, 3], gamma=1)) == []
    assert len(await workers.verified(workers.verify(tokens=[3], rows=1))) == 1


async def test_a_client_that_takes_no_reply_in_keeps_no_session(workers: Workers) -> None:
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    async with grpc.aio.insecure_channel(workers.address, options=narrow) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        # A reply of 80 kB. Asked often enough, none of it is read.
        await call.write(workers.verify(tokens=[3] * 70, rows=MAX_GAMMA + 1))
        for index in range(20):
            again = target_pb2.VerifyRequest(round=index, base_length=5, tokens=[3] * 65, rows=MAX_GAMMA + 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await call.write(again)
        async with asyncio.timeout(30):
            while workers.engine.memory.sessions:
                await asyncio.sleep(0.05)
        assert not call.done(), "it is still there"
        assert len((await workers.verified(workers.verify(tokens=[3], rows=1)))[0].rows) == 1
        call.cancel()
