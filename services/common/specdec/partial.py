"""A row of p of which the unlikely part has stayed with the target worker: what the rule nearly always needs of it.

A draw is one uniform over a fixed order (`sampling.draw`): the support of the q that tests the row, ids ascending,
then all other ids by falling p, ties by ascending id. What is here is a prefix of that order and the mass of what
follows, so that a draw falls on the token that the whole row would give, or beyond what is here, and then it says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from services.common.specdec.types import BadRowError, FloatArray, Row

Ids: TypeAlias = npt.NDArray[np.uint32]
NO_IDS: Final[Ids] = np.empty(0, np.uint32)
_SCALARS: Final = 16
"""Bytes of the tail: its mass, and its winner."""


@dataclass(frozen=True, eq=False)
class PartialRow:
    """Some entries of a row, and the mass of all others.

    Attributes:
        support: uint32[s], ascending: where the q that tests the row is not 0. As asked for, not as sent back.
        weights: float32[s] or float64[s], p there.
        head_ids: uint32[m], the likeliest of the other ids, by falling weight, ties by ascending id.
        head_weights: float[m], p there.
        tail_mass: Sum of p over all ids that are in neither, in float64.
        tail_winner: Token and score (`coupled.Winner`) of the best of those under the request's noise, where it was
            asked for and they have mass.
    """

    support: Ids
    weights: FloatArray
    head_ids: Ids
    head_weights: FloatArray
    tail_mass: float
    tail_winner: tuple[int, float] | None = None

    @functools.cached_property
    def total(self) -> np.float64:
        """The sum of the row: support, head and tail, each summed in float64. Rounding apart it is the whole row's."""
        return np.float64(self.weights.sum(dtype=np.float64) + self.head_weights.sum(dtype=np.float64) + self.tail_mass)

    @property
    def nbytes(self) -> int:
        """Bytes that the row takes on the wire."""
        return partial_bytes(len(self.weights), len(self.head_ids))

    def weight(self, token: int) -> float:
        """Return the weight of one token of the support."""
        return Row(self.weights, self.support).weight(token)

    def over(self, support: Ids) -> PartialRow | None:
        """Return the same row for a q of another support, as far as its entries are here; else None.

        A row that was asked for before its q was known has no support; ids that move from its head to the support leave
        the rest of the head a prefix of the order.
        """
        if support is self.support or np.array_equal(support, self.support):
            return self
        if len(self.support) or not len(self.head_ids):
            return None
        order = self.head_ids.argsort()
        at = order.take(self.head_ids[order].searchsorted(support), mode="clip")
        if not np.array_equal(self.head_ids[at], support):
            return None
        stays = np.ones(len(self.head_ids), np.bool_)
        stays[at] = False
        weights = self.head_weights
        return PartialRow(support, weights[at], self.head_ids[stays], weights[stays], self.tail_mass, self.tail_winner)

    def check(self, vocab_size: int, tolerance: float = 1e-3) -> None:
        """Check that this is part of a distribution over the vocabulary; see `check_row`.

        Raises:
            BadRowError: Wrong sizes, ids out of range, out of order or twice, or weights that are negative, not finite
                or do not sum to 1 with the tail.
        """
        self._check_ids(vocab_size)
        known = np.concatenate([self.weights, self.head_weights], dtype=np.float64)
        if bad := np.flatnonzero(~np.isfinite(known)).tolist():
            raise BadRowError(f"has a non-finite entry, number {bad[0]} of those sent")
        if not np.isfinite(self.tail_mass):
            raise BadRowError(f"has a tail of mass {self.tail_mass}")
        if self.tail_winner is not None and not (self.tail_mass > 0 and 0 < self.tail_winner[1] < np.inf):
            raise BadRowError(f"has a tail of mass {self.tail_mass} with a winner of score {self.tail_winner[1]}")
        if self.tail_mass < 0 or (known < 0).any():
            raise BadRowError("has a negative entry")
        falls = self.head_weights[1:] < self.head_weights[:-1]
        ties = (self.head_weights[1:] == self.head_weights[:-1]) & (self.head_ids[1:] > self.head_ids[:-1])
        if not (falls | ties).all():
            raise BadRowError("has a head that is not in falling order")
        if not abs(self.total - 1) <= tolerance:
            raise BadRowError(f"sums to {self.total:.6g}, not to 1")

    def _check_ids(self, vocab_size: int) -> None:
        for ids, weights, name in (
            (self.support, self.weights, "support"),
            (self.head_ids, self.head_weights, "head"),
        ):
            if len(ids) != len(weights):
                raise BadRowError(f"has {len(weights)} probabilities for the {len(ids)} ids of its {name}")
        known = np.concatenate([self.support, self.head_ids])
        if self.tail_winner is not None:
            known = np.append(known, np.uint32(self.tail_winner[0]))
        if len(known) and int(known.max()) >= vocab_size:
            raise BadRowError(f"names a token past the vocabulary of {vocab_size}")
        known.sort()
        if (known[1:] == known[:-1]).any():
            raise BadRowError("names a token twice")


AnyRow: TypeAlias = Row | PartialRow
"""A row of p, whole or in part."""


def partial_bytes(support: int, head: int) -> int:
    """Return the bytes that a partial row takes on the wire, by the sizes of its support and head."""
    return 4 * support + 8 * head + _SCALARS


def narrowed(row: Row, support: Ids, head: int, winner: Callable[[Row], tuple[int, float]] | None = None) -> PartialRow:
    """Return what the rule needs of a row.

    Args:
        row: A row whose weights are finite and not negative.
        support: uint32[s], ascending, ids of the vocabulary.
        head: Most entries besides.
        winner: Chooses from the tail; None for no choice.
    """
    inside, outside = split(row, support)
    at = likeliest(outside.weights, head)
    head_ids = at.astype(np.uint32) if outside.ids is None else outside.ids[at]
    head_weights = outside.weights[at]
    outside.weights[at] = 0
    tail = Row(outside.weights, outside.ids)
    best = winner(tail) if winner is not None and tail.total > 0 else None
    return PartialRow(support, inside, head_ids, head_weights, float(tail.total), best)


def split(row: Row, support: Ids) -> tuple[FloatArray, Row]:
    """Return a row's weights at the ids of a support, and a copy of the row that is 0 there."""
    rest = row.weights.copy()
    if row.ids is None:
        inside = rest[support]
        rest[support] = 0
        return inside, Row(rest)
    inside = np.zeros(len(support), rest.dtype)
    at = row.ids.searchsorted(support)
    found = row.ids.take(at, mode="clip") == support if len(row.ids) else np.zeros(len(support), np.bool_)
    inside[found] = rest[at[found]]
    rest[at[found]] = 0
    return inside, Row(rest, row.ids)


def likeliest(weights: FloatArray, count: int) -> npt.NDArray[np.intp]:
    """Return where the largest weights are, by falling weight, ties in order of index.

    No more than `count`, and none that is 0. The weights sum to 1 or less.

    A threshold is lowered until enough of them are over it: one comparison of 49,152 entries takes 12 microseconds, a
    partial sort of them 270, a sort 4,600.
    """
    if count <= 0:
        return np.empty(0, np.intp)
    threshold = 1 / count
    while np.count_nonzero(weights >= threshold) < count and threshold > 1e-12:
        threshold /= 4
    at = np.flatnonzero(weights >= threshold if threshold > 1e-12 else weights > 0)
    if len(at) > 4 * count:
        at = at[weights[at] >= np.partition(weights[at], -count)[-count]]
    return at[np.argsort(-weights[at], kind="stable")][:count]
