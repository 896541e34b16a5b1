"""An n-gram guess where the text has one of enough length and such guesses have been kept, else the model.

Which of the two is decided by the text and by what became of the session's drafts before, so before anything is
sampled; a guess is certain of itself, and the rule is exact for any q.
"""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from services.common.engine.timing import PassTiming
from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.types import Draft, Row
from services.draft_worker.confidence import Fates, Guess, Rate
from services.draft_worker.ngram import continuation
from services.draft_worker.proposer import ProposalRequest, Proposer, ProposeSession, SessionRequest

_PRIOR_GUESS, _PRIOR_DRAFT = 0.5, 0.4
# In passes of the target. What exactly they are makes little difference.
_GUESS_COST, _DRAFT_COST = 0.015, 0.1
_TRY_AGAIN: Final = 16
"""Guesses that are passed over before one is followed all the same: text changes."""


class _Kept:
    """The share of a session's drafts of one kind that were kept, of those that were tested."""

    def __init__(self, prior: float) -> None:
        self._rate = Rate(prior, weight=4.0, memory=40.0)

    def observe(self, probability: float, kept: bool) -> None:  # noqa: ARG002
        """Learn what became of a draft."""
        self._rate.observe(kept)

    def pace(self, gamma: int, cost: float) -> float:
        """Return tokens a pass of the target takes, where a draft costs `cost` passes.

        (1 + alpha + .. + alpha^gamma) / (1 + gamma cost)
        """
        return sum(self._rate.value**kept for kept in range(gamma + 1)) / (1 + gamma * cost)


class Trust:
    """Whether a session follows its guesses or its model, by what became of both.

    Of this session alone: with a seed its drafts are a function of what it is asked.
    """

    def __init__(self) -> None:
        self.guesses, self.drafts = _Kept(_PRIOR_GUESS), _Kept(_PRIOR_DRAFT)
        self._passed_over = 0

    def in_guess(self, gamma: int) -> bool:
        """Tell whether a guess that was found is followed."""
        if self.guesses.pace(gamma, _GUESS_COST) >= self.drafts.pace(gamma, _DRAFT_COST):
            return True
        self._passed_over = (self._passed_over + 1) % _TRY_AGAIN
        return self._passed_over == 0


class CombinedProposer:
    """Opens sessions that look the last tokens up in the text, and ask a model where that finds nothing."""

    def __init__(self, model: Proposer, min_ngram: int, max_ngram: int) -> None:
        """Put a look-up in front of a model.

        Args:
            model: Asked where the look-up finds nothing.
            min_ngram: At least this many of the last tokens must have occurred before.
            max_ngram: The longest match is taken, up to this many.
        """
        self._model = model
        self._ngrams = min_ngram, max(min_ngram, max_ngram)

    async def open(self, request: SessionRequest) -> CombinedSession:
        """Open a session; see `Proposer.open`."""
        model = await self._model.open(request)
        return CombinedSession(model, *self._ngrams, request.most_tokens)


class CombinedSession:
    """One sequence."""

    def __init__(self, model: ProposeSession, min_ngram: int, max_ngram: int, capacity: int) -> None:
        self._model = model
        self._ngrams = min_ngram, max_ngram
        self._capacity = capacity
        self._text = array("I")
        # How much of the text the model has, its own drafts included: it has none of the guesses.
        self._told = 0
        self._guessed = False
        self._trust = Trust()
        self._fates = Fates(self._trust.drafts), Fates(self._trust.guesses)

    @property
    def timing(self) -> PassTiming:
        """What the last proposal took, so far."""
        return PassTiming() if self._guessed else self._model.timing

    async def propose(self, request: ProposalRequest) -> AsyncGenerator[Sequence[Draft], None]:
        """Yield a guess at once or drafts one by one; see `ProposeSession.propose`."""
        request.check_length(self._capacity)
        base_length, gamma = request.base_length, request.gamma
        if base_length > len(self._text):
            raise UnknownPrefixError(len(self._text))
        told = min(self._told, base_length)
        missing = [*self._text[told:base_length], *request.tokens]
        del self._text[base_length:]
        self._text.extend(request.tokens)
        for fates in self._fates:
            fates.tell(base_length, request.tokens)
        guess = continuation(self._text, min(gamma, self._capacity - len(self._text)), *self._ngrams)
        if guess and not self._trust.in_guess(len(guess)):
            guess = []
        self._guessed = bool(guess)
        # Asked for nothing, the model takes the text and the features in all the same.
        wanted = 0 if guess else gamma
        drafting = self._model.propose(dataclasses.replace(request, base_length=told, tokens=missing, gamma=wanted))
        self._told = len(self._text)
        async with contextlib.aclosing(drafting):
            async for drafts in drafting:
                self._sent([draft.token for draft in drafts])
                self._told = len(self._text)
                yield drafts
        if guess:
            self._sent(guess)
            yield [Draft(token, Row.point_mass(token)) for token in guess]

    def _sent(self, tokens: Sequence[int]) -> None:
        """Note drafts, of which a later request will tell what became."""
        for position, token in enumerate(tokens, len(self._text)):
            self._fates[self._guessed].add(Guess(position, token, 1.0))
        self._text.extend(tokens)

    def close(self) -> None:
        """Free what the session holds. May be called again."""
        self._model.close()
