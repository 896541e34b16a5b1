"""What speculation should give: Leviathan et al. 2023, sections 3.1 to 3.3; for the coupled rule Daliri et al. 2024."""

from __future__ import annotations

import numpy as np

from services.common.specdec.types import Row


def overlap(p: Row, q: Row, vocab_size: int) -> float:
    """Return the probability that a draft from q is kept: the sum over tokens of min(p, q)."""
    p_dense, q_dense = p.dense(vocab_size), q.dense(vocab_size)
    return float(np.minimum(p_dense / p_dense.sum(), q_dense / q_dense.sum()).sum())


def agreement(p: Row, q: Row, vocab_size: int) -> float:
    """Return the probability that a draft from q is kept by the coupled rule (Daliri et al. 2024, arXiv 2408.07978).

    The sum over tokens i of 1 / sum_j max(p_j / p_i, q_j / q_i). With D the total variation of p and q it is at most
    1 - D, which is `overlap`, and at least (1 - D) / (1 + D).
    """
    p_dense, q_dense = p.dense(vocab_size), q.dense(vocab_size)
    both = (p_dense > 0) & (q_dense > 0)
    p_all, q_all = p_dense / p_dense.sum(), q_dense / q_dense.sum()
    p_i, q_i = p_all[both], q_all[both]
    # max(p_j / p_i, q_j / q_i) is the first where p_j / q_j >= p_i / q_i: sorted by that, sums take the place of pairs.
    order = np.argsort(-(p_i / q_i), kind="stable")
    p_i, q_i = p_i[order], q_i[order]
    p_above = np.cumsum(p_i) + p_all[q_all == 0].sum()
    q_below = np.cumsum(q_i[::-1])[::-1] - q_i + q_all[p_all == 0].sum()
    return float((1 / (p_above / p_i + q_below / q_i)).sum())


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
