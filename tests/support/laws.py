"""Laws on the last two tokens: what the scripted workers sample from, and what the tests expect.

The processors are written anew in numpy, one row at a time, so that they share nothing with the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.common.specdec.types import Row, SamplingParams

Table: TypeAlias = npt.NDArray[np.float64]
"""float64[vocab, vocab, vocab]: by the token before the last, the last, and the next."""
Rows: TypeAlias = dict[tuple[int, int], Row]
"""By the token before the last and the last."""


def process(logits: Table, params: SamplingParams) -> Table:
    """Return the distribution of one row of logits: temperature, then top-k, top-p, min-p."""
    if params.temperature == 0:
        certain: Table = np.eye(len(logits))[int(np.argmax(logits))]
        return certain
    scaled = np.exp((logits - logits.max()) / params.temperature)
    probabilities: Table = scaled / scaled.sum()
    for keep in (_top_k, _top_p, _min_p):
        probabilities = np.where(keep(probabilities, params), probabilities, 0.0)
        probabilities /= probabilities.sum()
    return probabilities


def _top_k(probabilities: Table, params: SamplingParams) -> npt.NDArray[np.bool_]:
    if not 0 < params.top_k < len(probabilities):
        return np.ones(len(probabilities), bool)
    kept: npt.NDArray[np.bool_] = probabilities >= np.sort(probabilities)[-params.top_k]
    return kept


def _top_p(probabilities: Table, params: SamplingParams) -> npt.NDArray[np.bool_]:
    order = np.argsort(-probabilities, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(probabilities[order])[:-1]])
    kept = np.zeros(len(probabilities), bool)
    kept[order[before < params.top_p]] = True
    return kept


def _min_p(probabilities: Table, params: SamplingParams) -> npt.NDArray[np.bool_]:
    kept: npt.NDArray[np.bool_] = probabilities >= params.min_p * probabilities.max()
    return kept


@dataclass(frozen=True)
class Law:
    """The logits of the target and of the draft.

    Attributes:
        p_logits: The target's table.
        q_logits: The draft's table.
    """

    p_logits: Table
    q_logits: Table
    _tables: dict[tuple[str, SamplingParams], Table] = field(default_factory=dict, repr=False)
    _rows: dict[tuple[str, SamplingParams], Rows] = field(default_factory=dict, repr=False)

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.p_logits)

    def p(self, params: SamplingParams) -> Table:
        """Return the target's distributions: float64[vocab, vocab, vocab]."""
        return self._table("p", self.p_logits, params)

    def q(self, params: SamplingParams) -> Table:
        """Return the draft's distributions: float64[vocab, vocab, vocab]."""
        return self._table("q", self.q_logits, params)

    def p_rows(self, params: SamplingParams) -> Rows:
        """Return the target's rows as a worker sends them, by context."""
        return self._encoded("p", self.p_logits, params)

    def q_rows(self, params: SamplingParams) -> Rows:
        """Return the draft's rows as a worker sends them, by context."""
        return self._encoded("q", self.q_logits, params)

    def alpha(self, params: SamplingParams) -> float:
        """Return the probability that a tested draft is kept, averaged over contexts as p visits them."""
        overlap = np.minimum(self.p(params), self.q(params)).sum(axis=2)
        return float((self.visits(params) * overlap).sum())

    def visits(self, params: SamplingParams) -> Table:
        """Return how often p visits each context in the long run: float64[vocab, vocab]."""
        p = self.p(params)
        share = np.full((self.vocab_size,) * 2, 1 / self.vocab_size**2)
        for _ in range(200):
            share = np.einsum("ab,abc->bc", share, p)
        return share

    def _table(self, name: str, logits: Table, params: SamplingParams) -> Table:
        if (name, params) not in self._tables:
            self._tables[name, params] = np.apply_along_axis(process, 2, logits, params)
        return self._tables[name, params]

    def _encoded(self, name: str, logits: Table, params: SamplingParams) -> Rows:
        if (name, params) not in self._rows:
            table = self._table(name, logits, params)
            self._rows[name, params] = {(a, b): row(table[a, b]) for a, b in np.ndindex(table.shape[:2])}
        return self._rows[name, params]


def close_law(*, distance: float, seed: int, vocab_size: int = 4, spread: float = 0.5, offset: float = 0.0) -> Law:
    """Return a random law whose draft is near its target.

    The target has as many different rows as there are tokens, shared by the contexts in a pattern that both of the last
    two tokens matter to: fewer laws to tell apart need fewer tokens to do it. The draft has a row for each context.

    Args:
        distance: Standard deviation of the draft's logits about the target's.
        seed: Of the tables.
        vocab_size: Tokens of the vocabulary.
        spread: Standard deviation of the target's logits.
        offset: Added to all logits. It changes no distribution, but coarse precision shows at large logits.
    """
    rng = np.random.default_rng(seed)
    before, last = np.indices((vocab_size, vocab_size))
    p_logits = offset + spread * rng.standard_normal((vocab_size, vocab_size))[(before + 2 * last) % vocab_size]
    return Law(p_logits, p_logits + distance * rng.standard_normal(p_logits.shape))


def far(law: Law) -> Law:
    """Return the law with a draft that likes best what the target likes least."""
    return Law(law.p_logits, -2.5 * law.p_logits)


def blind(law: Law) -> Law:
    """Return the law with a draft that sees no context, so that the same number gives the same draft again."""
    logits = np.log(np.array([2.0] + [1.0] * (law.vocab_size - 1)))
    return Law(law.p_logits, np.broadcast_to(logits, law.p_logits.shape))


def context(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the last two tokens; before the start stands token 0."""
    return (tokens[-2] if len(tokens) > 1 else 0, tokens[-1])


def row(probabilities: Table) -> Row:
    """Return a distribution as a worker sends it: float32, sparse where it has zeros."""
    weights = probabilities.astype(np.float32)
    ids = np.flatnonzero(weights).astype(np.uint32)
    return Row(weights) if len(ids) == len(weights) else Row(weights[ids], ids)
