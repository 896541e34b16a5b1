"""The loss is KL(p || q) + weight * TV(p, q), its gradient what autograd would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.distill.loss import DraftLoss, teacher

POSITIONS, HEAD = 7, 30


def rows(covered: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, and p of a head that holds this share of the target's mass."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(POSITIONS, HEAD, generator=generator)
    p = covered * torch.softmax(2 * torch.randn(POSITIONS, HEAD, generator=generator), dim=-1)
    return logits, p


def by_definition(logits: torch.Tensor, p: torch.Tensor, weight: float) -> torch.Tensor:
    """KL over the head, and TV with what the head lacks: 1 - sum min(p, q); the entropy of p left out."""
    q = torch.softmax(logits, dim=-1)
    cross_entropy = -(p * torch.log_softmax(logits, dim=-1)).sum()
    return (cross_entropy - weight * torch.minimum(p, q).sum()) / len(logits)


@pytest.mark.parametrize("covered", [1.0, 0.9])
@pytest.mark.parametrize("weight", [0.0, 1.0, 3.0])
def test_value_and_gradient_are_those_of_the_definition(covered: float, weight: float) -> None:
    logits, p = rows(covered)
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss: Any = DraftLoss.apply(ours, p, weight)
    expected = by_definition(theirs, p.double(), weight)
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_p_is_the_targets_softmax_over_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(5, 8, generator=generator), torch.randn(40, 8, generator=generator)
    logits = hidden @ head.T
    p = teacher(hidden, head[3:20], torch.logsumexp(logits, -1))
    torch.testing.assert_close(p, torch.softmax(logits, -1)[:, 3:20])
