"""The rule of speculative sampling (Leviathan et al. 2023, Algorithm 1), in float64.

A draft x ~ q is kept with probability min(1, p(x) / q(x)). At the first rejection the token is drawn from the residual
norm(max(0, p - q)) and the round ends; when all drafts are kept, one more token is drawn from the last row of p. Each
token then has exactly the law p, whatever q is.

A row of p may come in part (`partial.PartialRow`): accepting needs no more. Where a draw does, a `RowNeededError` says
which row, and the rule is applied again, with the same numbers, once that row is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

from services.common.specdec.partial import NO_IDS, AnyRow, Ids, PartialRow
from services.common.specdec.randomness import Purpose
from services.common.specdec.sampling import draw
from services.common.specdec.types import BadRowError, Decision, Draft, Origin, Row, check_row

Uniforms = Callable[[int, Purpose], float]
"""The uniform of an offset in the round and a purpose."""


class BadTargetRowError(BadRowError):
    """A row of p that the sequence reached is no distribution: the request cannot go on."""


class RowNeededError(Exception):
    """A partial row does not hold what the rule needs of it. No failure: the row is fetched.

    Attributes:
        offset: Which row.
        support: Where it is needed: the support of the q that tests it; None where it is needed whole.
    """

    def __init__(self, offset: int, support: Ids | None) -> None:
        super().__init__(f"p[{offset}] is needed {'whole' if support is None else 'over another support'}")
        self.offset = offset
        self.support = support


def accept_probability(p: float, q: float) -> float:
    """Return min(1, p / q), the probability of keeping a draft that has probability q > 0 under its own row."""
    return min(1.0, p / q)


@overload
def residual(p: Row, q: Row) -> Row: ...
@overload
def residual(p: PartialRow, q: Row) -> PartialRow: ...
def residual(p: AnyRow, q: Row) -> AnyRow:
    """Return max(0, p - q), not normalised: what p has more of than q.

    Where float rounding leaves no mass at all (p and q equal up to rounding), it falls back to p.

    Args:
        p: The target's row: float32[vocab], sparse, or in part over q's support.
        q: The draft's row, float32[vocab] or sparse.

    Returns:
        A float64 row over p's support, in part where p is.
    """
    if isinstance(p, PartialRow):
        return _partial_residual(p, q)
    # Totals are numpy's float64, which makes quotients of float32 weights float64; Python's float would not.
    left = p.weights / p.total
    if p.ids is None and q.ids is None:
        left -= q.weights / q.total
    elif p.ids is None:
        left[q.ids] -= q.weights / q.total
    elif q.ids is None:
        left -= q.weights[p.ids] / q.total
    else:
        at_p = p.ids.searchsorted(q.ids)
        at_p[at_p == len(p.ids)] = 0
        shared = p.ids[at_p] == q.ids
        left[at_p[shared]] -= q.weights[shared] / q.total
    np.maximum(left, 0.0, out=left)
    return Row(left, p.ids) if left.any() else p


def _partial_residual(p: PartialRow, q: Row) -> PartialRow:
    """Return the residual of a partial row. Outside of q's support it is p, so the tail's mass is its own."""
    q_weights = q.weights[p.support] if q.ids is None else q.weights[q.weights > 0]
    left = np.maximum(p.weights / p.total - q_weights / q.total, 0.0)
    head, tail_mass = p.head_weights / p.total, float(p.tail_mass / p.total)
    if not (left.any() or head.any() or tail_mass > 0):
        return p
    return PartialRow(p.support, left, p.head_ids, head, tail_mass)


def usable_drafts(drafts: Sequence[Draft], vocab_size: int) -> tuple[int, str]:
    """Return how many drafts may be tested, and what is wrong with the next one.

    A bad q row costs the drafts from its position on. Those before it are tested as usual, and nothing here looks at a
    token before its own row has been found good: whether a draft is tested must not depend on its value.
    """
    for i, draft in enumerate(drafts):
        try:
            check_row(draft.q, vocab_size)
        except BadRowError as error:
            return i, f"q[{i}] {error}"
        if not draft.q.weight(draft.token) > 0:
            return i, f"q[{i}] gives its own draft no probability"
    return len(drafts), ""


def accept(p_rows: Sequence[AnyRow], drafts: Sequence[Draft], vocab_size: int, uniforms: Uniforms) -> Decision:
    """Apply the rule to one round.

    Args:
        p_rows: p_rows[i] is the law of the token at offset i given the drafts before it; at least len(drafts) rows.
            Where there are no more, the last one tests the last draft, and no token follows when all are kept.
        drafts: The drafts to test, all usable (see `usable_drafts`).
        vocab_size: Entries of a row.
        uniforms: The round's random numbers.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution. Rows beyond are not looked at.
        RowNeededError: A row that the sequence reached has come in part, and more of it is needed.
    """
    for offset, draft in enumerate(drafts):
        p = _over(checked_target_row(p_rows[offset], offset, vocab_size), draft.q.support, offset)
        p_x = p.weight(draft.token) / float(p.total)
        q_x = draft.q.weight(draft.token) / float(draft.q.total)
        if uniforms(offset, Purpose.ACCEPT) >= accept_probability(p_x, q_x):
            token = _draw(residual(p, draft.q), draft.q.support, uniforms(offset, Purpose.REPLACE), offset)
            kept = tuple(d.token for d in drafts[:offset])
            return Decision((*kept, token), accepted=offset, tested=offset + 1, origin=Origin.RESIDUAL)
    last = len(drafts)
    if len(p_rows) == last > 0:
        return Decision(tuple(d.token for d in drafts), accepted=last, tested=last, origin=Origin.ACCEPTED_DRAFT)
    p = _over(checked_target_row(p_rows[last], last, vocab_size), NO_IDS, last)
    token = _draw(p, NO_IDS, uniforms(last, Purpose.REPLACE), last)
    origin = Origin.BONUS if drafts else Origin.TARGET
    return Decision((*(d.token for d in drafts), token), accepted=last, tested=last, origin=origin)


def _over(p: AnyRow, support: Ids, offset: int) -> AnyRow:
    """Return a row that holds p over the support of the q that tests it."""
    if isinstance(p, Row):
        return p
    known = p.over(support)
    if known is None:
        raise RowNeededError(offset, support)
    return known


def _draw(row: AnyRow, support: Ids, u: float, offset: int) -> int:
    token = draw(row, support, u)
    if token is None:
        raise RowNeededError(offset, None)
    return token


def checked_target_row(p: AnyRow, offset: int, vocab_size: int) -> AnyRow:
    """Return the row at an offset that the sequence has reached.

    Raises:
        BadTargetRowError: It is no distribution.
    """
    try:
        if isinstance(p, PartialRow):
            p.check(vocab_size)
        else:
            check_row(p, vocab_size)
    except BadRowError as error:
        raise BadTargetRowError(f"p[{offset}] {error}") from None
    return p
