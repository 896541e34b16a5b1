"""The rule by enumeration: the law of a round's tokens, summed over every draft and every branch, is p."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from services.common.specdec import acceptance
from services.common.specdec.acceptance import accept_probability, residual
from services.common.specdec.types import Row
from tests.specdec.rows import PAIRS, VOCAB, Weights, forms, normalised, prefixes

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Laws:
    """p and q after every prefix of the round: every token's law depends on all tokens before it."""

    p: dict[Prefix, Row]
    q: dict[Prefix, Row]


def make_laws(gamma: int, kinds: list[str], rng: np.random.Generator) -> Laws:
    p, q = {}, {}
    for prefix in prefixes(gamma):
        p_weights, q_weights = PAIRS[kinds[rng.integers(len(kinds))]](rng)
        p[prefix], q[prefix] = forms(p_weights, rng), forms(q_weights, rng)
    return Laws(p, q)


def target_law(laws: Laws, length: int, prefix: Prefix = ()) -> Weights:
    """The law of the next `length` tokens under p alone: float64[VOCAB, ...]."""
    if length == 0:
        return np.ones(())
    first = normalised(laws.p[prefix])
    return np.stack([first[x] * target_law(laws, length - 1, (*prefix, x)) for x in range(VOCAB)])


def round_law(laws: Laws, gamma: int) -> Weights:
    """The law of the first gamma + 1 tokens of a round, extended by p where the round emits fewer."""
    law = np.zeros((VOCAB,) * (gamma + 1))
    for drafts in itertools.product(range(VOCAB), repeat=gamma):
        drafted = [normalised(laws.q[drafts[:i]])[x] for i, x in enumerate(drafts)]
        if not np.prod(drafted) > 0:
            continue
        alive = float(np.prod(drafted))  # probability of these drafts, all kept so far
        for i, x in enumerate(drafts):
            p, q = laws.p[drafts[:i]], laws.q[drafts[:i]]
            keep = accept_probability(float(normalised(p)[x]), float(drafted[i]))
            replacement = normalised(residual(p, q))
            for y in range(VOCAB):
                after = target_law(laws, gamma - i, (*drafts[:i], y))
                law[(*drafts[:i], y)] += alive * (1 - keep) * replacement[y] * after
            alive *= keep
        law[drafts] += alive * normalised(laws.p[drafts])
    return law


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("kind", [*PAIRS, "mixed"])
def test_law_of_a_round_is_p(kind: str, gamma: int) -> None:
    rng = np.random.default_rng([gamma, *kind.encode()])
    for _ in range(12):
        laws = make_laws(gamma, list(PAIRS) if kind == "mixed" else [kind], rng)
        law = round_law(laws, gamma)
        assert law.sum() == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(law, target_law(laws, gamma + 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual", lambda p, q: p),
        ("residual", lambda p, q: Row(np.abs(p.dense(VOCAB) - q.dense(VOCAB)))),
        ("accept_probability", lambda p, q: min(1.0, q / p) if p else 1.0),
        ("accept_probability", lambda p, q: min(1.0, 1.02 * p / q)),
    ],
)
def test_enumeration_sees_a_wrong_rule(name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(acceptance, name)
    monkeypatch.setitem(globals(), name, wrong)
    laws = make_laws(2, ["random"], np.random.default_rng(7))
    assert np.abs(round_law(laws, 2) - target_law(laws, 3)).max() > 1e-4
