"""The rule of speculative sampling (Leviathan et al. 2023, Algorithm 1), in float64.

A draft x ~ q is kept with probability min(1, p(x) / q(x)). At the first rejection the token is drawn from the residual
norm(max(0, p - q)) and the round ends; when all drafts are kept, one more token is drawn from the last row of p. Each
token then has exactly the law p, whatever q is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from services.common.specdec.randomness import Purpose
from services.common.specdec.sampling import sample
from services.common.specdec.types import BadRowError, Decision, Draft, Origin, Row, check_row

Uniforms = Callable[[int, Purpose], float]
"""The uniform of an offset in the round and a purpose."""


class BadTargetRowError(BadRowError):
    """A row of p that the sequence reached is no distribution: the request cannot go on."""


def accept_probability(p: float, q: float) -> float:
    """Return min(1, p / q), the probability of keeping a draft that has probability q > 0 under its own row."""
    return min(1.0, p / q)


def residual(p: Row, q: Row) -> Row:
    """Return max(0, p - q), not normalised: what p has more of than q.

    Where float rounding leaves no mass at all (p and q equal up to rounding), it falls back to p.

    Args:
        p: The target's row, float32[vocab] or sparse.
        q: The draft's row, float32[vocab] or sparse.

    Returns:
        A float64 row over p's support.
    """
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
            return i, f"q[{i}] gives its own draft, token {draft.token}, no probability"
    return len(drafts), ""


def accept(p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, uniforms: Uniforms) -> Decision:
    """Apply the rule to one round.

    Args:
        p_rows: p_rows[i] is the law of the token at offset i given the drafts before it. Where there are no more rows than
            drafts, the last one has tested the last draft, and no token follows when all are kept.
        drafts: The drafts to test, all usable (see `usable_drafts`).
        vocab_size: Entries of a row.
        uniforms: The round's random numbers.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution. Rows beyond are not looked at.
    """
    for offset, draft in enumerate(drafts):
        p = checked_target_row(p_rows[offset], offset, vocab_size)
        p_x = p.weight(draft.token) / float(p.total)
        q_x = draft.q.weight(draft.token) / float(draft.q.total)
        if uniforms(offset, Purpose.ACCEPT) >= accept_probability(p_x, q_x):
            token = sample(residual(p, draft.q), uniforms(offset, Purpose.REPLACE))
            kept = tuple(d.token for d in drafts[:offset])
            return Decision((*kept, token), accepted=offset, tested=offset + 1, origin=Origin.RESIDUAL)
    last = len(drafts)
    if len(p_rows) == last > 0:
        return Decision(tuple(d.token for d in drafts), accepted=last, tested=last, origin=Origin.ACCEPTED_DRAFT)
    token = sample(checked_target_row(p_rows[last], last, vocab_size), uniforms(last, Purpose.REPLACE))
    origin = Origin.BONUS if drafts else Origin.TARGET
    return Decision((*(d.token for d in drafts), token), accepted=last, tested=last, origin=origin)


def checked_target_row(p: Row, offset: int, vocab_size: int) -> Row:
    """Return the row at an offset that the sequence has reached.

    Raises:
        BadTargetRowError: It is no distribution.
    """
    try:
        check_row(p, vocab_size)
    except BadRowError as error:
        raise BadTargetRowError(f"p[{offset}] {error}") from None
    return p
