"""Drawing a token from a row with one uniform.

`sample` goes by ascending id: a draft's choice, from a q that is all there. `draw` is the rule's: first the support of
the q that tested the row, by ascending id, then all other ids by falling weight, ties by ascending id. Of the same
weights it draws the same token whether they come dense, sparse or in part: the entries are added up one by one in that
order, in float64, and only the total, which scales the uniform, is added up in another order in each form. So a draw
differs only where the uniform is within a few units of 2^-53 of the edge between two tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from services.common.specdec.partial import AnyRow, Ids, PartialRow, likeliest, split
from services.common.specdec.types import Row

_BLOCK: Final = 256
_HEADS: Final = (0, 256, 4_096)
"""How many of the likeliest are looked through first: few draws fall beyond them, and only those need a whole sort."""


def sample(row: Row, u: float) -> int:
    """Return the token at `u` of the row's cumulative distribution.

    The row is normalised by its own float64 sum, so float32 rounding of the sum does not favour the last token. A token
    of weight 0 is never returned.

    Args:
        row: Weights with a positive sum.
        u: Uniform in [0, 1).
    """
    if len(row.weights) <= _BLOCK:
        inside = row.weights.cumsum(dtype=np.float64)
        at = _first_past(inside, u * inside[-1])
        return at if row.ids is None else int(row.ids[at])
    # Blocks first, then one of them token by token: sums of blocks are vectorised, a cumulative sum is serial, and over
    # a whole vocabulary it takes ten times as long.
    sums = np.add.reduceat(row.weights, np.arange(0, len(row.weights), _BLOCK), dtype=np.float64)
    ends = np.cumsum(sums)
    target = u * ends[-1]
    block = _first_past(ends, target)
    start = block * _BLOCK
    inside = np.cumsum(row.weights[start : start + _BLOCK], dtype=np.float64)
    at = start + _first_past(inside, target - (ends[block - 1] if block else 0.0))
    return at if row.ids is None else int(row.ids[at])


def draw(row: AnyRow, support: Ids, u: float) -> int | None:
    """Return the token at `u` of the fixed order, None where it is in the tail of a partial row.

    Args:
        row: Weights with a positive sum: p, or a residual. A partial one is over this same support.
        support: uint32[s], ascending: the ids that come first.
        u: Uniform in [0, 1).
    """
    target = u * row.total
    if isinstance(row, PartialRow):
        ends = np.concatenate([row.weights, row.head_weights]).cumsum(dtype=np.float64)
        # At its end rounding decides, if there is a tail; without one the last with mass is meant.
        if row.tail_mass > 0 and not (len(ends) and target < ends[-1]):
            return None
        at = _first_past(ends, target)
        return int(row.support[at] if at < len(row.support) else row.head_ids[at - len(row.support)])
    inside, outside = split(row, support)
    for count in (*_HEADS, len(outside.weights)):
        rest = likeliest(outside.weights, count)
        ends = np.concatenate([inside, outside.weights[rest]]).cumsum(dtype=np.float64)
        if len(ends) and target < ends[-1]:
            break
    at = _first_past(ends, target)
    if at < len(support):
        return int(support[at])
    index = int(rest[at - len(support)])
    return index if outside.ids is None else int(outside.ids[index])


def _first_past(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """Return the first index whose cumulative sum exceeds `target`: it has mass, or the sum would not have grown there.

    Rounding may leave none (u * total may be total itself, a block's sum depends on the order of its terms): then the
    last that has mass.
    """
    at = int(cumulative.searchsorted(target, side="right"))
    if at < len(cumulative):
        return at
    return int(cumulative.searchsorted(cumulative[-1], side="left"))
