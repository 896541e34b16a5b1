"""What speculation should give: the formulas of Leviathan et al. 2023, sections 3.1 to 3.3."""

from __future__ import annotations

import numpy as np

from services.common.specdec.types import Row


def overlap(p: Row, q: Row, vocab_size: int) -> float:
    """Return the probability that a draft from q is kept: the sum over tokens of min(p, q)."""
    p_dense, q_dense = p.dense(vocab_size), q.dense(vocab_size)
    return float(np.minimum(p_dense / p_dense.sum(), q_dense / q_dense.sum()).sum())


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the expected tokens of a target pass, (1 - alpha^(gamma + 1)) / (1 - alpha)."""
    if alpha == 1:
        return gamma + 1.0
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def expected_speedup(alpha: float, gamma: int, draft_cost: float, wire_cost: float = 0.0) -> float:
    """Return the speed-up over the target alone, expected_tokens / (gamma c + 1 + r).

    Args:
        alpha: Probability that a tested draft is kept.
        gamma: Drafts in a round.
        draft_cost: c, one draft step in units of one target pass.
        wire_cost: r, what the wire costs a round in the same units.
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + 1 + wire_cost)
