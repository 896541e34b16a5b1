"""Attention of a pass that packs several sessions: each over its own range of the KV pool.

Plugged into transformers' attention interface, so that the models' own forward calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from transformers import AttentionInterface

NAME = "paceline_packed"


class UnsupportedAttentionError(Exception):
    """The model asks for a kind of attention that is not here; the message names it."""


class Segment:
    """One session's part of a pass.

    Attributes:
        first: Its first row in the pass.
        count: Its rows, at positions length - count to length - 1.
        start: Its first place in the pool.
        length: Its tokens, those of this pass included.
        window: Positions that a row looks back on in any layer, its own included; None is no limit.
    """

    __slots__ = ("_masks", "count", "first", "length", "start", "window")

    def __init__(self, first: int, count: int, start: int, length: int, window: int | None = None) -> None:
        self.first = first
        self.count = count
        self.start = start
        self.length = length
        self.window = window
        # All layers with the same window share one.
        self._masks: dict[object, torch.Tensor | None] = {}

    def view(self, window: int | None) -> tuple[int, int]:
        """Return the first place that any of its rows looks at, and how many follow up to the last."""
        hidden = max(0, self.length - self.count + 1 - window) if window else 0
        return self.start + hidden, self.length - hidden

    def mask(self, window: int | None, group: int, device: torch.device) -> torch.Tensor | None:
        """Return which places of the view each row looks at, bool[group * count, view]; None where each looks at all.

        Args:
            window: A row looks at its own position and the `window - 1` before it; None is no limit.
            group: Query heads a key-value head; the mask is repeated for each.
            device: Where it is wanted.
        """
        if self.count == 1:
            return None
        key = (window, group, device)
        if key not in self._masks:
            hidden = self.length - self.view(window)[1]
            at = torch.arange(hidden, self.length, device=device)
            row = torch.arange(self.length - self.count, self.length, device=device).unsqueeze(1)
            seen = at <= row
            if window:
                seen &= at > row - window
            self._masks[key] = seen.repeat(group, 1)
        return self._masks[key]


def packed_attention(
    module: object,  # noqa: ARG001 - the interface's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface's
    *,
    segments: Sequence[Segment],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return softmax(q kᵀ · scaling) v for each session by itself: [1, tokens, heads, value_dim].

    The query heads that share a key-value head are laid along the query length, so that keys and values are read once
    and nothing is repeated in memory.

    Args:
        module: Of the layer.
        query: [1, heads, tokens, dim], the sessions one after the other.
        key: [1, kv_heads, size, dim], the whole pool of the layer.
        value: [1, kv_heads, size, value_dim].
        attention_mask: None; each session's mask follows from its segment.
        segments: The sessions.
        scaling: Of the scores; None is 1 / sqrt(dim).
        sliding_window: Positions that a row looks back on, its own included.
        softcap: Scores s become softcap * tanh(s / softcap).
        kwargs: What else the model hands down.

    Raises:
        UnsupportedAttentionError: The model has attention sinks or a position bias.
    """
    refuse_unsupported(kwargs)
    heads, tokens, dim = query.shape[1:]
    kv_heads, value_dim = value.shape[1], value.shape[3]
    group = heads // kv_heads
    grouped = query.reshape(1, kv_heads, group, tokens, dim)
    out = value.new_empty((tokens, kv_heads, group, value_dim))
    for segment in segments:
        first, count = segment.first, segment.count
        window = min(sliding_window or segment.window, segment.window) if segment.window else sliding_window
        place, length = segment.view(window)
        attended = _attend(
            grouped[:, :, :, first : first + count].reshape(1, kv_heads, group * count, dim),
            key.narrow(2, place, length),
            value.narrow(2, place, length),
            segment.mask(window, group, query.device),
            scaling,
            softcap,
        )
        out[first : first + count] = attended.view(kv_heads, group, count, value_dim).permute(2, 0, 1, 3)
    return out.view(1, tokens, heads, value_dim), None


def refuse_unsupported(kwargs: Mapping[str, Any]) -> None:
    """Look through what else a model hands down to its attention.

    Raises:
        UnsupportedAttentionError: It has attention sinks or a position bias.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"attention with {name}")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    if not softcap:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


AttentionInterface.register(NAME, packed_attention)
