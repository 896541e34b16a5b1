"""What the target worker sends of its rows: the parts that were asked for, one of them whole, no bad one in part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from paceline.v1 import target_pb2, target_pb2_grpc, worker_pb2
from services.common.engine.model import LoadedModel
from services.common.rpc.codec import decode_row, decode_target_row, encode_row, encode_sampling, encode_support
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.specdec.coupled import winner
from services.common.specdec.partial import NO_IDS, Ids, PartialRow, narrowed
from services.common.specdec.types import BadRowError, Row, SamplingParams, check_row
from services.target_worker.service import TargetService, serving
from services.target_worker.verifier import Verifier
from services.target_worker.wanted import Wanted
from tests.support.engines import StartEngine, load
from tests.support.models import VOCAB, make_tiny_llama

TOKENS = [3, 4, 5, 6, 7, 8]
SUPPORTS = [np.array(ids, np.uint32) for ids in ([2, 9, 100], [4], [])]
HEAD = 7
SEED = 12


class Target:
    """A target worker, and streams of several requests to it."""

    def __init__(self, stub: Any, loaded: LoadedModel, identity: worker_pb2.ModelIdentity) -> None:
        self.loaded = loaded
        self._stub = stub
        self._identity = identity

    def request(
        self, *, first: bool = True, rule: int = worker_pb2.VERIFICATION_TOKEN, **fields: Any
    ) -> target_pb2.VerifyRequest:
        request = target_pb2.VerifyRequest(**{"tokens": TOKENS, "rows": 3, **fields})
        if first:
            request.start.CopyFrom(
                worker_pb2.SessionStart(
                    sampling=encode_sampling(SamplingParams()),
                    seed=SEED,
                    prompt_length=10,
                    max_new_tokens=20,
                    identity=self._identity,
                    verification=worker_pb2.Verification.ValueType(rule),
                )
            )
        return request

    async def replies(self, *requests: target_pb2.VerifyRequest) -> list[target_pb2.VerifyResponse]:
        return [reply async for reply in self._stub.Verify(iter(requests))]

    async def whole(self) -> list[Row]:
        (reply,) = await self.replies(self.request())
        return [decode_row(row) for row in reply.rows]

    async def refused(self, **fields: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await self.replies(self.request(**fields))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return refusal.value.details() or ""


@pytest.fixture
async def target(tmp_path: Path, start_engine: StartEngine) -> AsyncIterator[Target]:
    loaded = load(make_tiny_llama(tmp_path / "target"))
    engine = await start_engine(loaded)
    server = Server(ServerSettings(), ["paceline.v1.TargetService"])
    service = TargetService(server, 30.0, 8)
    served = serving(loaded, Verifier(engine), engine.context_length, "target")
    service.attach(served)
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
    async with grpc.aio.insecure_channel(await server.listen()) as channel:
        yield Target(target_pb2_grpc.TargetServiceStub(channel), loaded, served.info.identity)
    await server.grpc.stop(None)


def encoded(supports: list[Ids]) -> list[bytes]:
    return [encode_support(ids) for ids in supports]


def check_same(part: Any, row: Row, support: Ids, head: int = HEAD) -> None:
    assert isinstance(part, PartialRow)
    part.check(VOCAB)
    expected = narrowed(row, support, head)
    np.testing.assert_array_equal(part.weights, expected.weights)
    np.testing.assert_array_equal(part.head_ids, expected.head_ids)
    np.testing.assert_array_equal(part.head_weights, expected.head_weights)
    assert part.tail_mass == expected.tail_mass


async def test_rows_in_part_are_the_rows(target: Target) -> None:
    whole = await target.whole()
    (reply,) = await target.replies(target.request(supports=encoded(SUPPORTS), head=HEAD))
    for message, row, support in zip(reply.rows, whole, SUPPORTS, strict=True):
        check_same(decode_target_row(message, support), row, support)
        assert not message.partial.HasField("tail_winner")


async def test_a_row_is_fetched_without_a_pass_as_long_as_the_session_holds_it(target: Target) -> None:
    whole = await target.whole()
    parts = {"supports": encoded(SUPPORTS), "head": HEAD}
    # A coordinator sends what the worker may lack: the tokens of the rows.
    again: dict[str, Any] = {"first": False, "base_length": 3, "tokens": TOKENS[3:]}
    requests = [
        target.request(**parts),
        target.request(**again, fetch=1),
        target.request(**again, fetch=2, supports=encoded(SUPPORTS[:1]), head=HEAD),
        target.request(**again | {"tokens": [6, 7, 9]}, rows=3, **parts),
        target.request(**again, fetch=1),
        target.request(**again, fetch=0),
    ]
    replies = await target.replies(*requests)
    assert [len(reply.rows) for reply in replies] == [3, 1, 1, 3, 1, 1]
    # The fourth request is about another text; the fifth asks for the first one again.
    assert [reply.timing.forward_tokens > 0 for reply in replies] == [True, False, False, True, True, False]
    np.testing.assert_array_equal(decode_row(replies[1].rows[0]).weights, whole[1].weights)
    check_same(decode_target_row(replies[2].rows[0], SUPPORTS[0]), whole[2], SUPPORTS[0])
    np.testing.assert_allclose(decode_row(replies[4].rows[0]).weights, whole[1].weights, atol=1e-6)
    np.testing.assert_allclose(decode_row(replies[5].rows[0]).weights, whole[0].weights, atol=1e-6)


async def test_a_worker_that_knows_nothing_answers_a_fetch(target: Target) -> None:
    whole = await target.whole()
    short, reply = await target.replies(
        target.request(base_length=3, tokens=TOKENS[3:], fetch=1), target.request(first=False, fetch=1)
    )
    assert short.known_length == 0
    assert short.HasField("known_length")
    np.testing.assert_allclose(decode_row(reply.rows[0]).weights, whole[1].weights, atol=1e-6)


@pytest.mark.parametrize("head", [0, HEAD])
async def test_under_coupled_a_row_comes_with_its_winner(target: Target, head: int) -> None:
    whole = await target.whole()
    coupled: dict[str, Any] = {"rule": worker_pb2.VERIFICATION_COUPLED, "head": head}
    (reply,) = await target.replies(target.request(**coupled, supports=[b""] * 3))
    for i, (message, row) in enumerate(zip(reply.rows, whole, strict=True)):
        part = decode_target_row(message, NO_IDS)
        check_same(part, row, NO_IDS, head)
        assert isinstance(part, PartialRow)
        position = len(TOKENS) - 2 + i
        tail = row.weights.copy()
        tail[part.head_ids] = 0
        # float32 of another stream's pass, so that the scores are near and not the same.
        expected = winner(Row(tail), SEED, position)
        assert part.tail_winner == (expected.token, pytest.approx(expected.score, rel=1e-5))
    assert reply.ByteSize() < 200 + 3 * 8 * head


async def test_a_bad_row_goes_out_as_it_is(target: Target) -> None:
    with torch.no_grad():
        target.loaded.model.model.norm.weight.fill_(float("nan"))
    (reply,) = await target.replies(target.request(supports=encoded(SUPPORTS), head=0))
    for message, support in zip(reply.rows, SUPPORTS, strict=True):
        row = decode_target_row(message, support)
        assert isinstance(row, Row)
        with pytest.raises(BadRowError, match="non-finite"):
            check_row(row, VOCAB)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"supports": [b""]}, "supports is '1 entries': must be none, or 3: one for each row that is returned"),
        ({"supports": [b""] * 4}, "supports is '4 entries'"),
        ({"supports": [b""] * 3, "fetch": 0}, "supports is '3 entries': must be none, or 1"),
        ({"supports": [b"", b"abc", b""]}, "supports[1] is '3 bytes': must be ids of 4 bytes"),
        (
            {"supports": encoded([np.array([5, 5], np.uint32)]) + [b""] * 2},
            "supports[0][1] is 'not above the one before it': must be asc",
        ),
        ({"supports": [b""] * 2 + encoded([np.array([9, 2], np.uint32)])}, "supports[2][1] is 'not above the one"),
        ({"supports": [b""] * 2 + encoded([np.array([VOCAB], np.uint32)])}, f"supports[2] is 'up to {VOCAB}': must be"),
        ({"fetch": 3}, "fetch is 3: must be 0 to 2"),
        ({"fetch": 2**32 - 1}, "fetch is 4294967295: must be 0 to 2"),
        ({"fetch": 0, "rows": 0}, "rows is 0: must be 1 to"),
    ],
)
async def test_what_is_refused(target: Target, fields: dict[str, Any], told: str) -> None:
    assert told in await target.refused(**fields)
    assert len(await target.whole()) == 3


@pytest.mark.parametrize("head", [2**32 - 1, VOCAB, 160])
async def test_a_head_that_is_as_long_as_the_row_is_no_saving(target: Target, head: int) -> None:
    (reply,) = await target.replies(target.request(supports=[b""] * 3, head=head))
    assert [row.WhichOneof("form") for row in reply.rows] == ["dense"] * 3


class TestBytes:
    VOCAB = 49_152

    @pytest.mark.parametrize("spread", [0.0, 2.0])
    async def test_a_row_in_part_is_a_twentieth_of_a_dense_one(self, spread: float) -> None:
        rng = np.random.default_rng(0)
        weights = np.exp(spread * rng.standard_normal(self.VOCAB))
        row = Row((weights / weights.sum()).astype(np.float32))
        support = np.sort(rng.permutation(self.VOCAB)[:128]).astype(np.uint32)
        (message,) = await Wanted([support], 1_024, 1).messages([row], None)
        (whole,) = await Wanted(None, 0, 1).messages([row], None)
        assert message.ByteSize() < 0.05 * whole.ByteSize()
        assert decode_target_row(message, support).total == pytest.approx(float(row.total), abs=1e-12)

    async def test_a_sparse_row_that_is_smaller_goes_whole(self) -> None:
        row = Row(np.array([0.5, 0.5], np.float32), np.array([3, 9], np.uint32))
        (message,) = await Wanted([NO_IDS], 1_024, 1).messages([row], None)
        assert message.WhichOneof("form") == "sparse"


class TestCodec:
    PART = PartialRow(
        np.array([1, 3], np.uint32), np.float32([0.125, 0.25]), np.array([0], np.uint32), np.float32([0.5]), 0.125
    )

    def test_there_and_back(self) -> None:
        support = self.PART.support
        back = decode_target_row(encode_row(self.PART), support)
        assert isinstance(back, PartialRow)
        assert back.support is support
        for name in ("weights", "head_ids", "head_weights"):
            np.testing.assert_array_equal(getattr(back, name), getattr(self.PART, name))
        assert (back.tail_mass, back.tail_winner) == (0.125, None)

    def test_a_winner(self) -> None:
        part = PartialRow(NO_IDS, np.empty(0), NO_IDS, np.empty(0), 1.0, (0, 0.25))
        back = decode_target_row(encode_row(part), NO_IDS)
        assert isinstance(back, PartialRow)
        assert back.tail_winner == (0, 0.25)

    @pytest.mark.parametrize("field", ["support", "head_ids", "head_probabilities"])
    def test_bytes_that_are_no_entries_make_a_bad_row(self, field: str) -> None:
        message = encode_row(self.PART)
        setattr(message.partial, field, b"abc")
        with pytest.raises(BadRowError):
            check_row(decode_row(message), 8)
        row = decode_target_row(message, self.PART.support)
        assert isinstance(row, Row)
        with pytest.raises(BadRowError):
            check_row(row, 8)

    def test_a_row_in_part_that_nobody_asked_for_is_a_bad_row(self) -> None:
        row = decode_target_row(encode_row(self.PART), None)
        assert isinstance(row, Row)
        with pytest.raises(BadRowError):
            check_row(row, 8)

    @pytest.mark.parametrize("field", ["support", "head_probabilities"])
    def test_fewer_entries_than_ids_make_a_bad_row(self, field: str) -> None:
        message = encode_row(self.PART)
        setattr(message.partial, field, b"")
        row = decode_target_row(message, self.PART.support)
        assert isinstance(row, PartialRow)
        with pytest.raises(BadRowError, match="0 probabilities for the"):
            row.check(8)
