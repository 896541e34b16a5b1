"""Drawing a token from a row with one uniform."""

from __future__ import annotations

import numpy as np

from services.common.specdec.types import Row


def sample(row: Row, u: float) -> int:
    """Return the token at `u` of the row's cumulative distribution.

    The row is normalised by its own float64 sum, so float32 rounding of the sum does not favour the last token. A token
    of weight 0 is never returned.

    Args:
        row: Weights with a positive sum.
        u: Uniform in [0, 1).
    """
    cumulative = np.cumsum(row.weights, dtype=np.float64)
    total = cumulative[-1]
    at = int(np.searchsorted(cumulative, u * total, side="right"))
    # u * total may round up to total itself: then the last token that has mass.
    at = min(at, int(np.searchsorted(cumulative, total, side="left")))
    return at if row.ids is None else int(row.ids[at])
