"""Rows in part that are none: one ends the request if the sequence reaches it, and no other request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.v1 import distribution_pb2
from tests.faults.waiting import until_free
from tests.support.cluster import scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import TargetScript

PROMPT = [0, 1]
SAME = close_law(distance=0.0, seed=2, vocab_size=8)
Partial = distribution_pb2.PartialDistribution


def nan_in_the_tail(row: Partial) -> None:
    row.tail_mass = float("nan")


def more_than_all(row: Partial) -> None:
    row.tail_mass += 0.5


def negative(row: Partial) -> None:
    weights = np.frombuffer(row.head_probabilities, np.float32).copy()
    weights[-1] *= -1
    row.head_probabilities = weights.tobytes()


def nan_in_the_head(row: Partial) -> None:
    row.head_probabilities = np.full(2, np.nan, np.float32).tobytes()


def upside_down(row: Partial) -> None:
    row.head_ids = np.frombuffer(row.head_ids, np.uint32)[::-1].tobytes()
    row.head_probabilities = np.frombuffer(row.head_probabilities, np.float32)[::-1].tobytes()


def one_id_twice(row: Partial) -> None:
    row.head_ids = row.head_ids[:4] * 2


def past_the_vocabulary(row: Partial) -> None:
    row.head_ids = np.array([8, 9], np.uint32).tobytes()


def an_entry_too_few(row: Partial) -> None:
    row.head_probabilities = row.head_probabilities[:4]


def half_an_entry(row: Partial) -> None:
    row.support += b"ab"


BAD = {
    nan_in_the_tail: "has a tail of mass nan",
    more_than_all: "sums to 1.5, not to 1",
    negative: "has a negative entry",
    nan_in_the_head: "has a non-finite entry",
    upside_down: "has a head that is not in falling order",
    one_id_twice: "names a token twice",
    past_the_vocabulary: "names a token past the vocabulary of 8",
    an_entry_too_few: "has 1 probabilities for the 2 ids of its head",
    half_an_entry: "has 0 entries, the vocabulary 8",
}


class Spoils(TargetScript):
    """Sends a bad part at one offset of each round."""

    def __init__(self, spoil: Callable[[Partial], None], offset: int) -> None:
        super().__init__(in_part=True)
        self._spoil = spoil
        self._offset = offset

    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        if self._offset < len(reply.rows) and reply.rows[self._offset].HasField("partial"):
            self._spoil(reply.rows[self._offset].partial)
        return (reply,)


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
async def test_a_bad_part_that_is_reached_ends_the_request(spoil: Callable[[Partial], None]) -> None:
    async with scripted_cluster(SAME, row_head=2) as cluster:
        cluster.target.script = Spoils(spoil, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(PROMPT, gamma=0, max_tokens=20)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert f"the target's row p[0] {BAD[spoil]}" in (caught.value.details() or "")
        cluster.target.script = TargetScript(in_part=True)
        assert len((await cluster.generate(PROMPT, gamma=0, max_tokens=20)).tokens) == 20
        await until_free(cluster)


async def test_a_bad_part_that_is_not_reached_is_not_looked_at() -> None:
    far = close_law(distance=6.0, spread=1.0, seed=2, vocab_size=8)
    async with scripted_cluster(far, target=Spoils(nan_in_the_tail, 3), row_head=8) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=8, seed=3)
    rounds = reply.result.speculation.per_round
    assert any(row.proposed == 3 for row in rounds)
    assert all(row.accepted < 3 for row in rounds)
    assert len(reply.tokens) == 8
