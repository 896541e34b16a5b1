"""Rows for the tests of the rule: random, adversarial, dense and sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from services.common.specdec.types import Row

VOCAB = 4
Weights = npt.NDArray[np.float64]


def dense(*weights: float) -> Row:
    return Row(np.array(weights, np.float64))


def sparse(weights: dict[int, float]) -> Row:
    ids = sorted(weights)
    return Row(np.array([weights[i] for i in ids], np.float64), np.array(ids, np.uint32))


def as_sparse(row: Row) -> Row:
    """The same law, written with the ids of its support."""
    assert row.ids is None
    ids = np.flatnonzero(row.weights).astype(np.uint32)
    return Row(row.weights[ids], ids)


def normalised(row: Row) -> Weights:
    full = row.dense(VOCAB)
    full /= full.sum()
    return full


def _simplex(rng: np.random.Generator) -> Weights:
    return rng.dirichlet(np.full(VOCAB, 0.7))


def _with_zeros(rng: np.random.Generator) -> Weights:
    weights = _simplex(rng)
    weights[rng.permutation(VOCAB)[: rng.integers(1, VOCAB)]] = 0
    weights /= weights.sum()
    return weights


def _pair_random(rng: np.random.Generator) -> tuple[Weights, Weights]:
    return _simplex(rng), _simplex(rng)


def _pair_zeros_in_q(rng: np.random.Generator) -> tuple[Weights, Weights]:
    return _simplex(rng), _with_zeros(rng)


def _pair_zeros_in_both(rng: np.random.Generator) -> tuple[Weights, Weights]:
    return _with_zeros(rng), _with_zeros(rng)


def _pair_equal(rng: np.random.Generator) -> tuple[Weights, Weights]:
    weights = _with_zeros(rng)
    return weights, weights.copy()


def _pair_disjoint(rng: np.random.Generator) -> tuple[Weights, Weights]:
    order = rng.permutation(VOCAB)
    cut = int(rng.integers(1, VOCAB))
    p, q = np.zeros(VOCAB), np.zeros(VOCAB)
    p[order[:cut]], q[order[cut:]] = rng.dirichlet(np.ones(cut)), rng.dirichlet(np.ones(VOCAB - cut))
    return p, q


def _pair_point_masses(rng: np.random.Generator) -> tuple[Weights, Weights]:
    return np.eye(VOCAB)[rng.integers(VOCAB)], np.eye(VOCAB)[rng.integers(VOCAB)]


def _pair_tiny(rng: np.random.Generator) -> tuple[Weights, Weights]:
    p, q = rng.dirichlet(np.full(VOCAB, 0.02)) + 1e-300, rng.dirichlet(np.full(VOCAB, 0.02)) + 1e-300
    return p / p.sum(), q / q.sum()


PAIRS: dict[str, Callable[[np.random.Generator], tuple[Weights, Weights]]] = {
    "random": _pair_random,
    "zeros in q": _pair_zeros_in_q,
    "zeros in both": _pair_zeros_in_both,
    "p = q": _pair_equal,
    "disjoint": _pair_disjoint,
    "point masses": _pair_point_masses,
    "tiny": _pair_tiny,
}


def forms(weights: Weights, rng: np.random.Generator) -> Row:
    """A row of these weights, dense or sparse, float64 or float32, by chance."""
    row = Row(weights if rng.random() < 0.5 else weights.astype(np.float32))
    # float32 can round every tiny weight to zero, but never all of a row.
    return row if rng.random() < 0.5 else as_sparse(row)


def prefixes(length: int) -> Iterator[tuple[int, ...]]:
    """Every token sequence of at most `length`."""
    for n in range(length + 1):
        yield from np.ndindex(*(VOCAB,) * n)
