"""Several steps of drafting at once, for all positions of a text: what training and its measurements run.

Step 1 knows the target's states, step s the draft's own after the first s - 1: exactly what a round of drafting sees,
for every position where it could begin (training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache

from services.common.engine.draft_model import DraftModel


class _Steps(Cache):
    """Keys and values of all steps so far, each layer's side by side: step 1 first."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self._held:
            keys, values = self._held[layer_idx]
            key_states = torch.cat([keys, key_states], dim=2)
            value_states = torch.cat([values, value_states], dim=2)
        self._held[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        return 0


def unroll(
    model: DraftModel, tokens: torch.Tensor, features: torch.Tensor | None, steps: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield for each step the number of positions at the beginning that it has nothing for, and its hidden states.

    Args:
        model: The draft.
        tokens: int64[batch, positions].
        features: The target's states, [batch, positions, features]; None for a draft without.
        steps: How many; without features there is one, the others would be the same.

    Yields:
        Positions to skip, and a: [batch, positions, hidden], the state after each token, which predicts the next.
    """
    count = tokens.shape[1]
    positions = torch.arange(count, device=tokens.device).unsqueeze(0)
    cache = _Steps()
    states: torch.Tensor | None = None
    if model.fuse is not None and features is not None:
        states = _shifted(model.fuse(features))
    for step in range(1, (steps if states is not None else 1) + 1):
        out = model.body(
            inputs_embeds=model.embed(tokens, states),
            attention_mask=_mask(count, step, tokens.device),
            position_ids=positions,
            cache=cache,
            use_cache=True,
        ).last_hidden_state
        # The first position of a text has no state before it.
        yield (step if states is not None else 0), out
        states = _shifted(out)


def _shifted(states: torch.Tensor) -> torch.Tensor:
    """Return at each position the state of the one before; zero at the first."""
    return torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))


def _mask(count: int, step: int, device: torch.device) -> torch.Tensor:
    """Return which keys of steps 1..step each position of this step looks at: bool[1, 1, count, step * count].

    In step s, position i looks at step 1's keys up to i - s + 1, then at one key of each later step r: at i - s + r.
    """
    at = torch.arange(count, device=device)
    blocks = [at.unsqueeze(0) <= at.unsqueeze(1) - (step - 1)]
    blocks += [at.unsqueeze(0) == at.unsqueeze(1) - step + earlier for earlier in range(2, step + 1)]
    mask = torch.cat(blocks, dim=1)
    # A row that looks at nothing would be NaN; what it says is skipped.
    mask[: step - 1, 0] = True
    return mask.unsqueeze(0).unsqueeze(0)
