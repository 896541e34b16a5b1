"""Rows that are no distribution: one of p ends the request if the sequence reaches it, one of q costs drafts only."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from services.common.specdec.types import Row
from tests.faults.waiting import until_free
from tests.support.cluster import scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import BadRow, DraftScript, TargetScript, Turn

PROMPT = [0, 1]
SAME = close_law(distance=0.0, seed=2)
FAR = close_law(distance=1.5, spread=1.0, seed=2)
BAD_P = [bad for bad in BadRow if bad is not BadRow.OUTSIDE_SUPPORT]
SAYS = {
    BadRow.NAN: "has a non-finite entry at index 0",
    BadRow.WRONG_SIZE: "has 5 entries, the vocabulary 4",
    BadRow.NOT_NORMALISED: "sums to 2, not to 1",
    BadRow.NEGATIVE: "has a negative entry at index",
}


@pytest.mark.parametrize("bad", BAD_P)
@pytest.mark.parametrize("position", [0, 2, 3])
async def test_a_bad_row_of_p_that_is_reached_ends_the_request(
    bad: BadRow, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every draft is kept the sequence reaches every row, that of the bonus token too."""
    async with scripted_cluster(SAME, target=TargetScript(bad_p=bad, bad_p_at=position)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(PROMPT, gamma=3, max_tokens=20, request_id="the-one")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        message = caught.value.details() or ""
        assert f"the target's row p[{position}] {SAYS[bad]}" in message
        assert "in round 0" in message
        assert "the-one" in message
        assert message in caplog.text
        await until_free(cluster)


class BadAfterRejection(TargetScript):
    """Give the first draft no probability, and spoil every row that only exists if it is kept."""

    def p_row(self, turn: Turn, offset: int) -> Row:
        if offset > 0:
            return BadRow.NAN.spoil(turn.p, turn.law.vocab_size, 0)
        return Row.point_mass(3)


class DraftsZero(DraftScript):
    def sampled(self, turn: Turn) -> Row:
        return Row.point_mass(0)

    def reported(self, turn: Turn) -> Row:
        return Row.point_mass(0)


async def test_a_bad_row_of_p_that_is_not_reached_is_not_looked_at() -> None:
    async with scripted_cluster(FAR, draft=DraftsZero(), target=BadAfterRejection()) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=12)
        # Without drafts the only row is the one at offset 0.
        alone = await cluster.generate(PROMPT, gamma=0, max_tokens=12)
    assert reply.tokens == alone.tokens == [3] * 12
    assert [row.tested for row in reply.result.speculation.per_round[:-1]] == [1] * 11
    assert all(row.accepted == 0 for row in reply.result.speculation.per_round)


@pytest.mark.parametrize("bad", BadRow)
@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_bad_row_of_q_costs_the_drafts_from_its_position_on(bad: BadRow, position: int) -> None:
    async with scripted_cluster(SAME, draft=DraftScript(bad_q=bad, bad_q_at=position)) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=21, seed=1)
    rows = reply.result.speculation.per_round
    assert len(reply.tokens) == 21
    # Those before it are kept as usual: here every draft is.
    assert [(row.proposed, row.accepted) for row in rows[:-1]] == [(position, position)] * (len(rows) - 1)
    assert all(row.degraded for row in rows if row.gamma > position)
    assert reply.result.speculation.degraded_rounds == sum(row.gamma > position for row in rows)
    assert len(rows) == -(-21 // (position + 1))


async def test_a_bad_row_of_q_leaves_the_drafts_before_it_as_they_were() -> None:
    """The same request with drafts that stop before the bad row: the same tokens, round by round."""
    answers = []
    for script in (DraftScript(bad_q=BadRow.NAN, bad_q_at=2), DraftScript(stop_at=2)):
        async with scripted_cluster(FAR, draft=script) as cluster:
            answers.append(await cluster.generate(PROMPT, gamma=4, max_tokens=60, seed=11))
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].origins == answers[1].origins
    assert answers[1].result.speculation.degraded_rounds == 0


class Garbage(DraftScript):
    """Rows as only a broken worker could send them."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self._row = row

    def q_row(self, turn: Turn, offset: int, token: int) -> Row:
        return self._row


GARBAGE = {
    "nothing": Row(np.empty(0, np.float32)),
    "all zero": Row(np.zeros(4, np.float32)),
    "infinities of both signs": Row(np.array([np.inf, -np.inf, 0, 0], np.float32)),
    "ids twice": Row(np.array([0.5, 0.5], np.float32), np.array([1, 1], np.uint32)),
    "ids descending": Row(np.array([0.5, 0.5], np.float32), np.array([2, 1], np.uint32)),
    "an id past the vocabulary": Row(np.array([0.5, 0.5], np.float32), np.array([1, 4], np.uint32)),
    "more ids than probabilities": Row(np.array([1.0], np.float32), np.array([1, 2], np.uint32)),
    "no ids": Row(np.empty(0, np.float32), np.empty(0, np.uint32)),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_for_q_is_no_draft(name: str) -> None:
    async with scripted_cluster(FAR, draft=Garbage(GARBAGE[name])) as cluster:
        reply = await cluster.generate(PROMPT, gamma=3, max_tokens=10)
    rows = reply.result.speculation.per_round
    assert len(reply.tokens) == 10
    assert all(row.proposed == 0 for row in rows)
    assert all(row.degraded for row in rows if row.gamma)
