"""The coupled rule (Daliri et al. 2024, arXiv 2408.07978): draft and target choose by the same noise.

The token at a position of the text is the winner of the target's row there: argmax over tokens of log p + G, where G is
Gumbel noise and a pure function of (seed, position, token id). Its law is p (the Gumbel-max trick), and it depends on
seed, text and target alone: what was drafted, and by whom, only decides how many tokens a pass gives. A draft is kept
where it is that token; one that was chosen by the same noise from q is kept with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (`analysis.agreement`).

Noise keyed by position is exact here: the number that comes back at a position gives the token that it gave before.

Scores are exp(log w + G) = w / E, where E = exp(-G) is exponential with mean 1: the same order as the sums have, and no
logarithm for most tokens.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.specdec.acceptance import RowNeededError, checked_target_row
from services.common.specdec.partial import AnyRow
from services.common.specdec.types import Decision, Draft, FloatArray, Origin, Row

_Ids = npt.NDArray[np.uint32]
_Words = npt.NDArray[np.uint64]
_Floats = npt.NDArray[np.float64]

# splitmix64: the Weyl sequence's step and the finaliser's constants.
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _SHIFT_TO_MANTISSA = (np.uint64(bits) for bits in (30, 27, 31, 12))
_ONE: Final = np.uint64(0x3FF0000000000000)


class Winner(NamedTuple):
    """The best of some tokens under a request's noise.

    Attributes:
        token: Its id.
        score: exp(log w + G), with its weight as it was given: scores of parts of one row can be compared.
    """

    token: int
    score: float


def accept_coupled(
    p_rows: Sequence[AnyRow], drafts: Sequence[Draft], vocab_size: int, seed: int, position: int
) -> Decision:
    """Apply the rule to one round: at each offset the token is the winner of p, and a draft that is another ends it.

    Args:
        p_rows: p_rows[i] is the law of the token at offset i given the drafts before it; at least len(drafts) rows.
            Where there are no more, the last one tests the last draft, and no token follows when all are kept.
        drafts: The drafts to test. Only their tokens matter.
        vocab_size: Entries of a row.
        seed: Key of the request, 64 bits.
        position: Of the token at offset 0: how many tokens are committed.

    Raises:
        BadTargetRowError: A row of p that the sequence reached is no distribution. Rows beyond are not looked at.
        RowNeededError: A row that the sequence reached has come in part, without the winner of its tail.
    """
    tokens: list[int] = []
    for offset, draft in enumerate(drafts):
        tokens.append(_chosen(p_rows[offset], offset, vocab_size, seed, position))
        if tokens[offset] != draft.token:
            return Decision(tuple(tokens), accepted=offset, tested=offset + 1, origin=Origin.RESIDUAL)
    kept = len(drafts)
    if len(p_rows) == kept > 0:
        return Decision(tuple(tokens), accepted=kept, tested=kept, origin=Origin.ACCEPTED_DRAFT)
    tokens.append(_chosen(p_rows[kept], kept, vocab_size, seed, position))
    return Decision(tuple(tokens), kept, kept, Origin.BONUS if drafts else Origin.TARGET)


def _chosen(p: AnyRow, offset: int, vocab_size: int, seed: int, position: int) -> int:
    p = checked_target_row(p, offset, vocab_size)
    if isinstance(p, Row):
        return winner(p, seed, position + offset).token
    if p.tail_mass > 0 and p.tail_winner is None:
        raise RowNeededError(offset, None)
    parts = [winner_among(p.support, p.weights, seed, position + offset)] if len(p.support) else []
    if len(p.head_ids):
        parts.append(winner_among(p.head_ids, p.head_weights, seed, position + offset))
    if p.tail_winner is not None:
        parts.append(Winner(*p.tail_winner))
    return functools.reduce(better, parts).token


def winner(row: Row, seed: int, position: int) -> Winner:
    """Return the best token of a row; with the law of the row over seeds.

    Args:
        row: Weights with a positive sum.
        seed: Key of the request, 64 bits.
        position: Of the token that the row is the law of: how many tokens come before it in the sequence.
    """
    return winner_among(row.ids, row.weights, seed, position)


def winner_among(ids: _Ids | None, weights: FloatArray, seed: int, position: int) -> Winner:
    """Return the best of some tokens of a row, of those that score the same the one with the lowest id.

    Args:
        ids: uint32[n], in any order, unique; None for the tokens 0..n-1.
        weights: float32[n] or float64[n], not negative. Not normalised: `better` of the winners of two parts of a
            row is the winner of the row.
        seed: Key of the request, 64 bits.
        position: Of the token to be chosen.
    """
    below = noise(seed, position, len(weights) if ids is None else ids)
    # -log(1 - v) >= v, so w / v bounds a score from above: logarithms only where that could still win.
    bounds = weights / below
    first = int(bounds.argmax())
    floor = float(weights[first]) / -float(np.log1p(-below[first]))
    # A little lower than the bound: log1p rounds.
    close = np.flatnonzero(bounds >= floor * (1 - 1e-12))
    scores = weights[close].astype(np.float64) / -np.log1p(-below[close])
    best = float(scores.max())
    tied = close[scores == best]
    return Winner(int(tied[0]) if ids is None else int(ids[tied].min()), best)


def better(first: Winner, second: Winner) -> Winner:
    """Return the winner of two parts of one row: the higher score, then the lower id."""
    return min(first, second, key=lambda each: (-each.score, each.token))


def noise(seed: int, position: int, ids: _Ids | int) -> _Floats:
    """Return the uniforms of a position, each a pure function of (seed, position, id): G = -log(-log(1 - v)).

    They are odd multiples of 2^-53, so neither 0 nor 1.

    Args:
        seed: Key of the request, 64 bits.
        position: Position in the sequence.
        ids: uint32[n], or n for the tokens 0..n-1.

    Returns:
        float64[n], uniform in (0, 1).
    """
    steps = _steps(ids) if isinstance(ids, int) else ids.astype(np.uint64) * _STEP
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"paceline.coupled").digest()
    mixed = steps + np.uint64(int.from_bytes(digest, "little"))
    shifted = mixed >> _SHIFT_1
    mixed ^= shifted
    mixed *= _MIX_1
    np.right_shift(mixed, _SHIFT_2, out=shifted)
    mixed ^= shifted
    mixed *= _MIX_2
    np.right_shift(mixed, _SHIFT_3, out=shifted)
    mixed ^= shifted
    # 52 bits as the mantissa of a number in [1, 2): a conversion of integers would take longer.
    mixed >>= _SHIFT_TO_MANTISSA
    mixed |= _ONE
    uniforms = mixed.view(np.float64)
    uniforms -= 1 - 2.0**-53
    return uniforms


@functools.lru_cache(maxsize=4)
def _steps(count: int) -> _Words:
    steps = np.arange(count, dtype=np.uint64) * _STEP
    steps.setflags(write=False)
    return steps
