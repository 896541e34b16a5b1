"""Drafting from the head of q alone: its few entries are all that is sent, and all that the target has to send p at.

Exact whatever is cut off, since the truncated q is the one that is sampled from and reported. What it costs is alpha:
sum min(p, q) loses p where q is now 0, and gains where q was below p and is now scaled up.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.common.specdec.partial import likeliest
from services.common.specdec.types import Row, SamplingParams


@dataclass(frozen=True, slots=True)
class Truncation:
    """What a draft keeps of q, once q has been processed as the request says.

    Attributes:
        top_k: This many of the likeliest tokens, of ties the lower ids; 0 keeps all.
        top_p: Of those the smallest set of likeliest ones that holds this share of their mass; 1 keeps all.
    """

    top_k: int = 0
    top_p: float = 1.0

    def ahead(self, params: SamplingParams) -> SamplingParams:
        """Return parameters under which the processors drop most of what `cut` would drop, at less cost.

        The likeliest of all are the likeliest of those that top-k and min-p leave; top-p counts shares of what it gets.
        """
        if not self.top_k or params.top_p < 1:
            return params
        return dataclasses.replace(params, top_k=min(self.top_k, params.top_k or self.top_k))

    def cut(self, q: Row) -> Row:
        """Return q truncated and normalised again, float32; q itself where there is nothing to cut off."""
        at = likeliest(q.weights, self.top_k or len(q.weights))
        if self.top_p < 1:
            up_to = q.weights[at].cumsum(dtype=np.float64)
            at = at[up_to - q.weights[at] < self.top_p * up_to[-1]]
        if len(at) == np.count_nonzero(q.weights):
            return q
        at.sort()
        weights = q.weights[at]
        return Row(
            (weights / weights.sum(dtype=np.float64)).astype(np.float32),
            at.astype(np.uint32) if q.ids is None else q.ids[at],
        )


NO_TRUNCATION: Final = Truncation()
