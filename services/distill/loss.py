"""How far q is from p, and what that costs: alpha is the sum over tokens of min(p, q)."""

from __future__ import annotations

from typing import Any

import torch


class DraftLoss(torch.autograd.Function):
    """Mean over positions of KL(p || q) + weight * TV(p, q), up to a constant; p need not sum to 1 over the head.

    With q = softmax(z), P = sum p, M = {q < p}:  d KL / dz = P q - p,   d TV / dz_j = -q_j (1[j in M] - sum_M q).
    Written out, for the rows are as long as the vocabulary: autograd would keep five of them.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, p: torch.Tensor, weight: float) -> torch.Tensor:
        """Return the loss.

        Args:
            ctx: Of autograd.
            logits: z, [positions, head], any float dtype.
            p: float32[positions, head], the target's probabilities of the head's tokens.
            weight: Of the total variation.
        """
        z = logits.float()
        log_total = torch.logsumexp(z, dim=-1, keepdim=True)
        mass = p.sum(dim=-1, keepdim=True)
        loss = (mass * log_total).sum() - torch.einsum("ij,ij->", p, z)
        q = (z - log_total).exp_()
        grad = q * mass
        grad -= p
        if weight:
            below = q < p
            held = q * below
            under = held.sum(dim=-1, keepdim=True)
            loss = loss - weight * torch.minimum(p, q).sum()
            grad.sub_(held, alpha=weight).addcmul_(q, under, value=weight)
        ctx.save_for_backward(grad.to(logits.dtype))
        ctx.count = len(logits)
        return loss / len(logits)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of the logits."""
        (grad,) = ctx.saved_tensors
        return grad * (grads[0] / ctx.count).to(grad.dtype), None, None


def teacher(hidden: torch.Tensor, head: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Return p of the head's tokens: float32[positions, head].

    Args:
        hidden: The target's last states, [positions, hidden].
        head: The rows of the target's head, [head, hidden].
        log_total: float32[positions], the logarithm of the softmax's denominator over the whole vocabulary.
    """
    return (hidden @ head.T).float().sub_(log_total.unsqueeze(-1)).exp_()
