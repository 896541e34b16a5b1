"""`accept` follows the pure functions, branch by branch, and looks at nothing that it does not need."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from services.common.specdec.acceptance import (
    BadTargetRowError,
    Uniforms,
    accept,
    accept_probability,
    residual,
    usable_drafts,
)
from services.common.specdec.partial import NO_IDS
from services.common.specdec.randomness import Purpose
from services.common.specdec.types import Draft, Origin, Row
from tests.specdec.rows import PAIRS, VOCAB, dense, forms, normalised, sparse

ALMOST_ONE = 1 - 2.0**-53
NAN_ROW = dense(0.5, np.nan, 0.25, 0.25)


class Stub:
    """Uniforms of chosen values, that counts what was asked for."""

    def __init__(self, accepts: Sequence[float], replace: float = 0.5) -> None:
        self.accepts, self.replace = accepts, replace
        self.asked: list[tuple[int, Purpose]] = []

    def __call__(self, offset: int, purpose: Purpose) -> float:
        self.asked.append((offset, purpose))
        return self.replace if purpose is Purpose.REPLACE else self.accepts[offset]


def token_edges(row: Row, support: Sequence[int]) -> list[tuple[int, float, float]]:
    """Each token with mass, with a uniform just inside either end of its share: the support, then by falling p."""
    weights = normalised(row)
    order = sorted(range(VOCAB), key=lambda x: (0, x) if x in support else (1, -weights[x], x))
    edges = np.concatenate([[0.0], np.cumsum(weights[order])])
    return [
        (token, start + 1e-9, end - 1e-9)
        for token, start, end in zip(order, edges, edges[1:], strict=False)
        if end - start > 1e-6
    ]


@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("kind", ["random", "zeros in q", "zeros in both", "p = q", "disjoint", "point masses"])
def test_every_branch(kind: str, gamma: int) -> None:
    rng = np.random.default_rng([gamma, *kind.encode()])
    pairs = [PAIRS[kind](rng) for _ in range(gamma + 1)]
    p_rows = [forms(p, rng) for p, _ in pairs]
    q_rows = [forms(q, rng) for _, q in pairs[:gamma]]
    for tokens in itertools.product(range(VOCAB), repeat=gamma):
        drafts = [Draft(token, q) for token, q in zip(tokens, q_rows, strict=True)]
        if usable_drafts(drafts, VOCAB) != (gamma, ""):
            continue
        keep = [
            accept_probability(float(normalised(p)[x]), float(normalised(q)[x]))
            for x, p, q in zip(tokens, p_rows, q_rows, strict=False)
        ]
        for rejected in range(gamma + 1):
            if min(keep[:rejected], default=1.0) == 0 or (rejected < gamma and keep[rejected] == 1):
                continue  # this branch has probability 0
            _check_branch(p_rows, drafts, keep, rejected)


def _check_branch(p_rows: list[Row], drafts: list[Draft], keep: list[float], rejected: int) -> None:
    gamma = len(drafts)
    # Just inside, then exactly on the edge: u < probability keeps, u = probability does not.
    accepts = [float(np.nextafter(k, 0)) for k in keep[:rejected]] + keep[rejected:]
    law, support = p_rows[gamma], NO_IDS
    if rejected < gamma:
        q = drafts[rejected].q
        law, support = residual(p_rows[rejected], q), q.support
    for token, *inside in token_edges(law, support.tolist()):
        for u in inside:
            stub = Stub(accepts, u)
            decision = accept(p_rows, drafts, VOCAB, stub)
            assert decision.tokens == (*(d.token for d in drafts[:rejected]), token)
            assert decision.accepted == rejected
            assert decision.tested == min(rejected + 1, gamma)
            assert decision.origin is (Origin.BONUS if rejected == gamma else Origin.RESIDUAL)
            assert decision.origins == (Origin.ACCEPTED_DRAFT,) * rejected + (decision.origin,)
            assert stub.asked == [(i, Purpose.ACCEPT) for i in range(decision.tested)] + [(rejected, Purpose.REPLACE)]


def test_a_round_without_drafts_is_the_target_alone() -> None:
    stub = Stub([], 0.65)
    decision = accept([dense(0.1, 0.5, 0.2, 0.2)], [], VOCAB, stub)
    assert (decision.tokens, decision.accepted, decision.tested) == ((2,), 0, 0)
    assert decision.origins == (Origin.TARGET,)
    assert stub.asked == [(0, Purpose.REPLACE)]


def test_a_last_row_that_tests_a_draft_gives_no_token_besides() -> None:
    p, q = dense(0.4, 0.3, 0.2, 0.1), dense(0.7, 0.1, 0.1, 0.1)
    stub = Stub([0.5, 0.1])
    decision = accept([p, p], [Draft(1, q), Draft(0, q)], VOCAB, stub)
    assert (decision.tokens, decision.accepted, decision.tested) == ((1, 0), 2, 2)
    assert decision.origins == (Origin.ACCEPTED_DRAFT,) * 2
    assert stub.asked == [(0, Purpose.ACCEPT), (1, Purpose.ACCEPT)]

    decision = accept([p, p], [Draft(1, q), Draft(0, q)], VOCAB, Stub([0.5, 0.9]))
    assert (decision.accepted, decision.tested) == (1, 2)
    assert decision.origins == (Origin.ACCEPTED_DRAFT, Origin.RESIDUAL)


def test_weights_are_normalised_before_they_are_compared() -> None:
    # p and q are the same law, written with sums that rounding moved apart: nothing may be rejected.
    p, q = dense(0.25, 0.25, 0.25, 0.25), dense(0.2501, 0.2501, 0.2501, 0.2501)
    assert accept([p, p], [Draft(3, q)], VOCAB, Stub([ALMOST_ONE])).accepted == 1


def test_p_rows_are_judged_only_when_the_sequence_reaches_them() -> None:
    p, q = dense(0.0, 0.5, 0.25, 0.25), dense(1.0, 0.0, 0.0, 0.0)
    drafts = [Draft(0, q), Draft(0, q)]
    decision = accept([p, NAN_ROW, NAN_ROW], drafts, VOCAB, Stub([0.0, 0.0]))
    assert (decision.accepted, decision.tested) == (0, 1)

    certain = dense(1.0, 0.0, 0.0, 0.0)
    with pytest.raises(BadTargetRowError, match=r"p\[1\] has a non-finite entry at index 1"):
        accept([certain, NAN_ROW, p], drafts, VOCAB, Stub([0.5, 0.5]))
    with pytest.raises(BadTargetRowError, match=r"p\[2\]"):
        accept([certain, certain, NAN_ROW], drafts, VOCAB, Stub([0.5, 0.5]))
    with pytest.raises(BadTargetRowError, match=r"p\[0\]"):
        accept([NAN_ROW], [], VOCAB, Stub([]))


def test_a_rejected_token_cannot_come_back() -> None:
    # NaN q once made a zero residual and the rejected token was emitted; with a good q the residual excludes it.
    p, q = dense(0.4, 0.3, 0.2, 0.1), dense(0.7, 0.1, 0.1, 0.1)
    for u in np.linspace(0, ALMOST_ONE, 101):
        assert accept([p, p], [Draft(0, q)], VOCAB, Stub([0.99], float(u))).tokens[0] != 0


class TestResidual:
    def test_is_the_positive_part_of_p_minus_q(self) -> None:
        p, q = dense(0.5, 0.25, 0.25, 0.0), dense(0.25, 0.5, 0.0, 0.25)
        np.testing.assert_allclose(residual(p, q).dense(VOCAB), [0.25, 0, 0.25, 0])

    @pytest.mark.parametrize("kind", list(PAIRS))
    def test_is_the_same_in_every_form(self, kind: str) -> None:
        rng = np.random.default_rng([1, *kind.encode()])
        for _ in range(20):
            p, q = PAIRS[kind](rng)
            ids_p, ids_q = np.flatnonzero(p).astype(np.uint32), np.flatnonzero(q).astype(np.uint32)
            rows = [
                residual(p_row, q_row).dense(VOCAB)
                for p_row in (Row(p), Row(p[ids_p], ids_p))
                for q_row in (Row(q), Row(q[ids_q], ids_q))
            ]
            for row in rows[1:]:
                np.testing.assert_allclose(row, rows[0], rtol=0, atol=1e-15)

    @pytest.mark.parametrize("p", [dense(0.5, 0.25, 0.25, 0.0), sparse({0: 0.5, 1: 0.25, 2: 0.25})])
    def test_without_mass_falls_back_to_p(self, p: Row) -> None:
        assert residual(p, dense(0.5, 0.25, 0.25, 0.0)) is p

    def test_leaves_its_arguments_alone(self) -> None:
        p, q = dense(0.5, 0.5, 0.0, 0.0), dense(0.25, 0.75, 0.0, 0.0)
        p.weights.flags.writeable = q.weights.flags.writeable = False  # as rows decoded from a message are
        residual(p, q)
        np.testing.assert_array_equal(p.weights, [0.5, 0.5, 0, 0])

    def test_of_float32_rows_is_float64(self) -> None:
        p = Row(np.array([0.5, 0.5, 0, 0], np.float32))
        q = Row(np.array([0.25, 0.75, 0, 0], np.float32))
        assert residual(p, q).weights.dtype == np.float64


class TestUsableDrafts:
    GOOD = Draft(1, dense(0.5, 0.5, 0.0, 0.0))

    def test_all_good(self) -> None:
        assert usable_drafts([self.GOOD] * 3, VOCAB) == (3, "")
        assert usable_drafts([], VOCAB) == (0, "")

    @pytest.mark.parametrize("at", [0, 1, 2])
    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (Draft(0, NAN_ROW), "non-finite"),  # its own token's entry is fine: the row is judged, not the token
            (Draft(1, NAN_ROW), "non-finite"),
            (Draft(0, dense(0.5, 0.5)), "2 entries, the vocabulary 4"),
            (Draft(0, dense(0.5, 0.1, 0.1, 0.1)), "sums to 0.8"),
            (Draft(3, dense(0.5, 0.5, 0.0, 0.0)), "its own draft no probability"),
            (Draft(7, dense(0.5, 0.5, 0.0, 0.0)), "its own draft no probability"),
            (Draft(1, sparse({0: 0.5, 2: 0.5})), "its own draft no probability"),
        ],
    )
    def test_a_bad_row_costs_the_drafts_from_its_position_on(self, bad: Draft, says: str, at: int) -> None:
        drafts = [self.GOOD] * 3
        drafts[at] = bad
        usable, why = usable_drafts(drafts, VOCAB)
        assert usable == at
        assert why.startswith(f"q[{at}]")
        assert says in why

    def test_does_not_depend_on_the_tokens_of_a_bad_row(self) -> None:
        counts = {usable_drafts([self.GOOD, Draft(token, NAN_ROW), self.GOOD], VOCAB)[0] for token in range(VOCAB)}
        assert counts == {1}


def test_uniforms_are_asked_for_by_position_and_purpose_once() -> None:
    rows = [dense(0.25, 0.25, 0.25, 0.25)] * 4
    drafts = [Draft(0, rows[0])] * 3
    stub = Stub([0.5] * 3)
    uniforms: Uniforms = stub
    accept(rows, drafts, VOCAB, uniforms)
    assert len(stub.asked) == len(set(stub.asked)) == 4
