"""How scripted workers behave: their faults by name, and small methods to override for the rest."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from services.common.specdec.coupled import winner
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Row, SamplingParams
from tests.support.laws import Law, context

NEVER = math.inf
"""A pause that only a newer request, or the end of the stream, ends."""


class BadRow(enum.Enum):
    """Ways for a row to be no distribution."""

    NAN = "a NaN at token 0"
    WRONG_SIZE = "one entry too many"
    NOT_NORMALISED = "twice every weight"
    NEGATIVE = "a negative weight"
    OUTSIDE_SUPPORT = "no mass on the token that was drawn"

    def spoil(self, good: Row, vocab_size: int, token: int) -> Row:
        """Return a bad row in place of a good one that `token` was drawn from."""
        weights = good.dense(vocab_size).astype(np.float32)
        if self is BadRow.NAN:
            weights[0] = np.nan
        elif self is BadRow.WRONG_SIZE:
            weights = np.append(weights, np.float32(0))
        elif self is BadRow.NOT_NORMALISED:
            weights *= 2
        elif self is BadRow.NEGATIVE:
            weights[np.argmax(weights)] += 1
            weights[np.argmin(weights)] -= 1
        else:
            weights[token] = 0
            rest = float(weights.sum())
            weights = weights / rest if rest else np.eye(vocab_size, dtype=np.float32)[(token + 1) % vocab_size]
        return Row(weights.astype(np.float32))


@dataclass
class Turn:
    """One request as a script sees it.

    Attributes:
        law: The tables.
        params: The session's sampling parameters.
        seed: The session's seed.
        coupled: The session's drafts are verified by the coupled rule.
        round: The round of the request.
        tokens: The worker's sequence; it grows as drafts are made.
        discarded: The draft that stood, from an earlier round, where this round's first draft will stand, if one did.
        stop_below: Least probability of being kept that the request wants a further draft to have.
    """

    law: Law
    params: SamplingParams
    seed: int
    coupled: bool
    round: int
    tokens: list[int]
    discarded: int | None = None
    stop_below: float = 0.0

    @property
    def p(self) -> Row:
        """The target's row after `tokens`."""
        return self.law.p_rows(self.params)[context(self.tokens)]

    @property
    def q(self) -> Row:
        """The draft's row after `tokens`."""
        return self.law.q_rows(self.params)[context(self.tokens)]


@dataclass
class DraftScript:
    """How a scripted draft behaves. Positions are offsets in the round; requests are counted from 1 over all streams.

    Attributes:
        bad_q: What is wrong with the rows at `bad_q_at`; None for nothing.
        bad_q_at: Where.
        late_at: Pause before this draft; those before it are sent first.
        late_s: For how long; `NEVER` ends with the next request.
        stop_at: Propose no more than this many, decided before sampling.
        die_on: Requests at which the stream breaks.
        die_as: The status that it breaks with.
        stall_on: Requests that are never answered.
        one_by_one: Send every draft in a message of its own.
    """

    bad_q: BadRow | None = None
    bad_q_at: int = 0
    late_at: int | None = None
    late_s: float = NEVER
    stop_at: int | None = None
    die_on: Collection[int] = ()
    die_as: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    stall_on: Collection[int] = ()
    one_by_one: bool = False

    def goes_on(self, turn: Turn, offset: int) -> bool:
        """Return whether to draft at `offset`; asked before sampling."""
        return self.stop_at is None or offset < self.stop_at

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        """Return how long to pause before the draft `token` at `offset` is sent."""
        return self.late_s if offset == self.late_at else 0.0

    def number(self, turn: Turn, offset: int) -> float:
        """Return the uniform that draws the draft at `offset`."""
        return uniform(turn.seed, turn.round, offset, Purpose.DRAFT)

    def sampled(self, turn: Turn) -> Row:
        """Return the row that the next draft is drawn from."""
        return turn.q

    def reported(self, turn: Turn) -> Row:
        """Return the row that is sent as q."""
        return turn.q

    def draw(self, turn: Turn, offset: int) -> int:
        """Return the draft at `offset`."""
        if turn.coupled:
            return winner(self.sampled(turn), turn.seed, len(turn.tokens)).token
        return sample(self.sampled(turn), self.number(turn, offset))

    def keeps(self, turn: Turn, token: int, q: Row) -> bool:
        """Return whether a draft that has been sampled is sent. An honest draft sends every one (invariant 5)."""
        return True

    def q_row(self, turn: Turn, offset: int, token: int) -> Row:
        """Return the row that is sent with the draft `token` at `offset`."""
        good = self.reported(turn)
        if self.bad_q is None or offset != self.bad_q_at:
            return good
        return self.bad_q.spoil(good, turn.law.vocab_size, token)

    def recall(self, tokens: list[int], request: Any) -> None:
        """Change what the worker remembers of the sequence before it takes a request."""

    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        """Return what is sent in place of a reply."""
        return (reply,)


@dataclass
class TargetScript:
    """How a scripted target behaves. Requests are counted from 1 over all streams.

    Attributes:
        bad_p: What is wrong with the rows at `bad_p_at`; None for nothing.
        bad_p_at: Offset in the round.
        late_s: Pause before every answer.
        die_on: Requests at which the stream breaks.
        die_as: The status that it breaks with.
        stall_on: Requests that are never answered.
        in_part: Send good rows in part where the request allows it, even where that is not smaller.
    """

    bad_p: BadRow | None = None
    bad_p_at: int = 0
    late_s: float = 0.0
    die_on: Collection[int] = ()
    die_as: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    stall_on: Collection[int] = ()
    in_part: bool = False

    def p(self, turn: Turn) -> Row:
        """Return the row after the turn's tokens."""
        return turn.p

    def p_row(self, turn: Turn, offset: int) -> Row:
        """Return the row at `offset`."""
        good = self.p(turn)
        if self.bad_p is None or offset != self.bad_p_at:
            return good
        return self.bad_p.spoil(good, turn.law.vocab_size, int(np.argmax(good.weights)))

    def recall(self, tokens: list[int], request: Any) -> None:
        """Change what the worker remembers of the sequence before it takes a request."""

    def replies(self, request: Any, reply: Any) -> Sequence[Any]:
        """Return what is sent in place of a reply."""
        return (reply,)
