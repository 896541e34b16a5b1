"""An n-gram guess first, else a model: the model keeps track of the text, and is never asked where a guess is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest

from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from services.common.specdec.types import Draft, Row
from services.draft_worker.combined import CombinedSession
from services.draft_worker.proposer import Features, ProposalRequest


class Model:
    """Drafts 90, 91, ..; keeps its text as a worker's session does."""

    timing = PassTiming(forward_tokens=1)

    def __init__(self) -> None:
        self.text: list[int] = []
        self.asked: list[int] = []
        self.features: list[Features | None] = []
        self.stops: list[float] = []

    async def propose(self, request: ProposalRequest) -> AsyncGenerator[Sequence[Draft], None]:
        assert request.base_length <= len(self.text), "it has no such prefix"
        self.text = [*self.text[: request.base_length], *request.tokens]
        self.asked.append(request.gamma)
        self.features.append(request.features)
        self.stops.append(request.stop_below)
        for offset in range(request.gamma):
            self.text.append(90 + offset)
            yield [Draft(90 + offset, Row.point_mass(90 + offset))]

    def close(self) -> None: ...


async def propose(
    session: CombinedSession, base: int, tokens: list[int], gamma: int, features: Features | None = None
) -> list[int]:
    groups = [group async for group in session.propose(ProposalRequest(0, base, tokens, gamma, features, 0.25))]
    return [draft.token for group in groups for draft in group]


async def test_a_long_enough_match_goes_first_and_the_model_follows_the_text() -> None:
    model = Model()
    session = CombinedSession(model, 3, 4, 100)
    text = [1, 2, 3, 4, 5, 9, 2, 3]
    # Two tokens have occurred before, not three.
    assert await propose(session, 0, text, 2) == [90, 91]
    assert session.timing == model.timing
    text = [*text, 90, 4]
    assert await propose(session, 9, [4], 2) == [90, 91]
    text = [*text[:8], 1, 2, 3]
    came = Features(3, b"ab")
    assert await propose(session, 8, [1, 2, 3], 3, came) == [4, 5, 9]
    assert session.timing == PassTiming()
    assert model.asked == [2, 2, 0]
    assert model.features[-1] == came
    assert model.stops == [0.25] * 3
    assert model.text == text
    # Two of the guesses were kept: the model has none of them yet.
    text = [*text, 4, 5, 7]
    assert await propose(session, 13, [7], 2) == [90, 91]
    assert model.text[:-2] == text


async def test_a_guess_is_no_longer_than_the_session() -> None:
    session = CombinedSession(Model(), 1, 4, 6)
    assert await propose(session, 0, [1, 2, 1, 2], 8) == [1, 2]


async def test_an_unknown_prefix_changes_nothing() -> None:
    model = Model()
    session = CombinedSession(model, 2, 4, 100)
    await propose(session, 0, [1, 2, 3], 0)
    with pytest.raises(UnknownPrefixError) as unknown:
        await propose(session, 5, [6], 2)
    assert unknown.value.known_length == 3
    assert model.text == [1, 2, 3]


async def test_a_text_longer_than_was_reserved_is_refused() -> None:
    """It is kept as long as the stream is open: a peer could fill the memory with it."""
    session = CombinedSession(Model(), 2, 4, 10)
    assert await propose(session, 0, [1, 2, 3, 4, 5, 6, 7], 0) == []
    with pytest.raises(InvalidFieldError, match="base_length \\+ tokens is 11: must be at most 10"):
        await propose(session, 7, [1, 2, 3, 4], 0)
