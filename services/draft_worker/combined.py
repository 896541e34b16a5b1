"""An n-gram guess where the text has one of enough length, else the model.

Which of the two is decided by the text, before anything is sampled; a guess is certain of itself, and the rule is exact
for any q.
"""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import AsyncGenerator, Sequence

from services.common.engine.timing import PassTiming
from services.common.specdec.errors import UnknownPrefixError
from services.common.specdec.types import Draft, Row
from services.draft_worker.ngram import continuation
from services.draft_worker.proposer import ProposalRequest, Proposer, ProposeSession, SessionRequest


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
        guess = continuation(self._text, min(gamma, self._capacity - len(self._text)), *self._ngrams)
        self._guessed = bool(guess)
        # Asked for nothing, the model takes the text and the features in all the same.
        wanted = 0 if guess else gamma
        drafting = self._model.propose(dataclasses.replace(request, base_length=told, tokens=missing, gamma=wanted))
        self._told = len(self._text)
        async with contextlib.aclosing(drafting):
            async for drafts in drafting:
                self._text.extend(draft.token for draft in drafts)
                self._told = len(self._text)
                yield drafts
        if guess:
            self._text.extend(guess)
            yield [Draft(token, Row.point_mass(token)) for token in guess]

    def close(self) -> None:
        """Free what the session holds. May be called again."""
        self._model.close()
