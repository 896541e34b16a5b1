"""An n-gram guess first, else a model: the model keeps track of the text, and is never asked where a guess is made."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence

import pytest

from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from services.common.specdec.types import Draft, Row
from services.draft_worker.combined import CombinedSession
from services.draft_worker.proposer import Features, ProposalRequest


class Model:
    """Drafts 90, 91, .. unless told otherwise; keeps its text as a worker's session does."""

    timing = PassTiming(forward_tokens=1)

    def __init__(self, first: int | None = None) -> None:
        """With `first`, each draft is a token of its own from there on."""
        self._next = itertools.count(first) if first is not None else None
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
            token = 90 + offset if self._next is None else next(self._next)
            self.text.append(token)
            yield [Draft(token, Row.point_mass(token))]

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


LAPS = [1, 2, 3, 4, 5, 6, 7, 8] * 3


class Sayings:
    """A text whose last tokens have always occurred before, but never with what follows now."""

    def __init__(self) -> None:
        self.model = Model(first=1000)
        self.session = CombinedSession(self.model, 2, 4, 10_000)
        self.text = list(LAPS)
        self._told = 0
        self._fresh = iter(range(100, 1000))

    async def drafts(self, *, ahead: bool) -> bool:
        """Let it draft, and tell whether it was a guess. The model's drafts are kept, a guess never is."""
        asked = len(self.model.asked)
        drafts = await propose(self.session, self._told, self.text[self._told :], 2)
        guessed = self.model.asked[asked] == 0
        self._told = len(self.text)
        if ahead:
            await propose(self.session, self._told + 2, [], 2)
        if not guessed:
            self.text += drafts
            self._told += 2
        self.text += [next(self._fresh), *LAPS[:8]]
        return guessed


@pytest.mark.parametrize("ahead", [False, True])
async def test_guesses_that_are_not_kept_are_passed_over(ahead: bool) -> None:
    """A request that only repeats a guess, for its drafts are in the target's pass, does not say that it was kept."""
    sayings = Sayings()
    guessed = [await sayings.drafts(ahead=ahead) for _ in range(70)]
    assert guessed[0], "the first one is given a chance"
    assert not all(guessed[:8])
    # Now and then one is tried.
    assert 2 <= sum(guessed[20:]) <= 5


async def test_guesses_that_are_kept_are_followed() -> None:
    session = CombinedSession(Model(), 2, 4, 10_000)
    text = list(LAPS)
    told = 0
    for _ in range(30):
        guess = await propose(session, told, text[told:], 3)
        assert guess == [text[-1] % 8 + 1, (text[-1] + 1) % 8 + 1, (text[-1] + 2) % 8 + 1]
        told = len(text) + 3
        text += [*guess, guess[-1] % 8 + 1]
