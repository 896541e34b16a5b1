"""Drawing a token from a row with one uniform."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from services.common.specdec.types import Row

_BLOCK: Final = 256


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


def _first_past(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """Return the first index whose cumulative sum exceeds `target`: it has mass, or the sum would not have grown there.

    Rounding may leave none (u * total may be total itself, a block's sum depends on the order of its terms): then the
    last that has mass.
    """
    at = int(cumulative.searchsorted(target, side="right"))
    if at < len(cumulative):
        return at
    return int(cumulative.searchsorted(cumulative[-1], side="left"))
