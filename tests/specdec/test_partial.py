"""Rows in part: the law and the tokens of whole rows, and nothing is taken for granted of what was sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from services.common.specdec.acceptance import RowNeededError, accept, accept_probability, residual
from services.common.specdec.partial import (
    NO_IDS,
    AnyRow,
    Ids,
    PartialRow,
    likeliest,
    narrowed,
    partial_bytes,
)
from services.common.specdec.randomness import Purpose
from services.common.specdec.sampling import draw
from services.common.specdec.types import BadRowError, Draft, Origin, Row
from tests.specdec.rows import PAIRS, VOCAB, Weights, as_sparse, dense, forms, normalised, sparse
from tests.specdec.test_enumeration import Laws, Prefix, make_laws, target_law

HEADS = [0, 1, 2]


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.uint32)


def drawn(part: AnyRow, whole: Row, support: Ids, u: float) -> int:
    """The token at `u`, from the whole row where the part does not reach so far."""
    token = draw(part, support, u)
    found = draw(whole, support, u) if token is None else token
    assert found is not None
    return found


def law_of_draw(part: AnyRow, whole: Row, support: Ids) -> Weights:
    """The law of `drawn` over all uniforms: constant between the edges of the order, so that one in each is enough."""
    weights = normalised(whole)
    order = [*support.tolist(), *np.lexsort((np.arange(VOCAB), -weights))]
    order = list(dict.fromkeys(order))
    edges = np.concatenate([[0.0], np.cumsum(weights[order]), [1.0]])
    law = np.zeros(VOCAB)
    for start, end in itertools.pairwise(edges):
        if end - start > 1e-15:
            law[drawn(part, whole, support, (start + end) / 2)] += end - start
    return law


def round_law(laws: Laws, gamma: int, head: int) -> Weights:
    """As `test_enumeration.round_law`, with every row of p in part and every draw made by the code."""
    law = np.zeros((VOCAB,) * (gamma + 1))
    for drafts in itertools.product(range(VOCAB), repeat=gamma):
        drafted = [normalised(laws.q[drafts[:i]])[x] for i, x in enumerate(drafts)]
        if not np.prod(drafted) > 0:
            continue
        alive = float(np.prod(drafted))
        for i, x in enumerate(drafts):
            p, q = laws.p[drafts[:i]], laws.q[drafts[:i]]
            part = narrowed(p, q.support, head)
            keep = accept_probability(part.weight(x) / float(part.total), float(drafted[i]))
            replacement = law_of_draw(residual(part, q), residual(p, q), q.support)
            for y in range(VOCAB):
                after = target_law(laws, gamma - i, (*drafts[:i], y))
                law[(*drafts[:i], y)] += alive * (1 - keep) * replacement[y] * after
            alive *= keep
        last = laws.p[drafts]
        law[drafts] += alive * law_of_draw(narrowed(last, NO_IDS, head), last, NO_IDS)
    return law


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize("kind", [*PAIRS, "mixed"])
def test_law_of_a_round_is_p(kind: str, gamma: int, head: int) -> None:
    rng = np.random.default_rng([gamma, head, *kind.encode()])
    for _ in range(4 if gamma == 2 else 12):
        laws = make_laws(gamma, list(PAIRS) if kind == "mixed" else [kind], rng)
        law = round_law(laws, gamma, head)
        np.testing.assert_allclose(law, target_law(laws, gamma + 1), rtol=0, atol=1e-12)


def test_the_enumeration_sees_a_tail_that_is_drawn_by_another_order() -> None:
    """A whole row that is gone through by id after the part has been gone through by p."""
    rng = np.random.default_rng(3)
    prefix: Prefix = ()
    p = make_laws(1, ["random"], rng).p[prefix]
    part, support = narrowed(p, NO_IDS, 1), np.arange(VOCAB, dtype=np.uint32)
    law = np.zeros(VOCAB)
    for u in (np.arange(20_000) + 0.5) / 20_000:
        token = draw(part, NO_IDS, u)
        law[drawn(p, p, support, u) if token is None else token] += 1 / 20_000
    assert np.abs(law - normalised(p)).max() > 0.01


class TestOrder:
    P = dense(0.1, 0.2, 0.05, 0.25, 0.1, 0.3)

    @pytest.mark.parametrize("head", [0, 1, 2, 6])
    @pytest.mark.parametrize("p", [P, as_sparse(P)], ids=["dense", "sparse"])
    def test_is_the_support_by_id_then_the_rest_by_falling_p_then_id(self, p: Row, head: int) -> None:
        support = ids(1, 4)
        order, shares = [1, 4, 5, 3, 0, 2], [0.2, 0.1, 0.3, 0.25, 0.1, 0.05]
        ends = np.cumsum(shares)
        for token, start, end in zip(order, [0, *ends], ends, strict=False):
            for u in (start + 1e-9, end - 1e-9):
                assert draw(p, support, u) == token
                known = order.index(token) < 2 + head
                assert draw(narrowed(p, support, head), support, u) == (token if known else None)

    def test_ties_go_by_id(self) -> None:
        p = dense(0.125, 0.25, 0.125, 0.25, 0.25)
        assert [draw(p, NO_IDS, u) for u in (0.1, 0.3, 0.6, 0.8, 0.9)] == [1, 3, 4, 0, 2]
        part = narrowed(p, NO_IDS, 4)
        assert part.head_ids.tolist() == [1, 3, 4, 0]
        assert part.tail_mass == 0.125

    def test_a_part_without_a_tail_never_runs_off_its_end(self) -> None:
        p = narrowed(dense(0.1, 0.2, 0.7, 0.0), ids(0), 9)
        assert p.tail_mass == 0
        assert draw(p, p.support, 1 - 2.0**-53) == 1
        assert draw(narrowed(dense(0.0, 1.0), ids(0, 1), 0), ids(0, 1), 1 - 2.0**-53) == 1


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_dense_sparse_and_partial_rows_give_the_same_token(spread: float) -> None:
    rng = np.random.default_rng(int(spread))
    beyond = 0
    for _ in range(25):
        # Rounded, so that there are ties.
        logits = np.round(spread * rng.standard_normal(6_000), 1)
        p_weights, noise = np.exp(logits), np.exp(rng.standard_normal(6_000))
        p_weights[rng.random(6_000) < 0.2] = 0
        p = Row((p_weights / p_weights.sum()).astype(np.float32))
        head_of_q = np.sort(np.argsort(-p_weights * noise)[:100])
        q_weights = (p_weights * noise)[head_of_q] + 1e-9
        q = Row((q_weights / q_weights.sum()).astype(np.float32), head_of_q.astype(np.uint32))
        parts = [narrowed(p, q.support, head) for head in (0, 1, 50, 500)]
        for u in rng.random(20):
            expected = draw(residual(p, q), q.support, u)
            assert draw(residual(as_sparse(p), q), q.support, u) == expected
            for part in parts:
                token = draw(residual(part, q), q.support, u)
                assert token in (expected, None)
                beyond += token is None
    assert beyond


class TestAccept:
    """The rule asks for what it lacks, by the row and by what of it, and has nothing decided twice."""

    P = dense(0.1, 0.2, 0.3, 0.4)
    Q = sparse({0: 0.5, 1: 0.5})

    @staticmethod
    def uniforms(offset: int, purpose: Purpose) -> float:
        return 0.99

    def needed(self, rows: Sequence[AnyRow], drafts: Sequence[Draft]) -> tuple[int, list[int] | None]:
        with pytest.raises(RowNeededError) as caught:
            accept(rows, drafts, VOCAB, self.uniforms)
        support = caught.value.support
        return caught.value.offset, None if support is None else support.tolist()

    def test_a_draw_in_the_tail_needs_the_row_whole(self) -> None:
        draft = Draft(0, self.Q)
        last = narrowed(self.P, NO_IDS, 0)
        assert self.needed([narrowed(self.P, self.Q.support, 1), last], [draft]) == (0, None)
        decision = accept([self.P, last], [draft], VOCAB, self.uniforms)
        assert (decision.tokens, decision.origin) == ((2,), Origin.RESIDUAL)
        assert self.needed([last], []) == (0, None)

    def test_a_row_over_no_support_that_turns_out_to_test_a_draft(self) -> None:
        draft = Draft(1, self.Q)
        assert self.needed([narrowed(self.P, NO_IDS, 3)], [draft]) == (0, [0, 1])
        known = accept([narrowed(self.P, NO_IDS, 4)], [draft], VOCAB, self.uniforms)
        assert known == accept([self.P], [draft], VOCAB, self.uniforms)

    def test_rows_that_are_not_reached_are_not_needed(self) -> None:
        certain, q = narrowed(dense(0.0, 0.0, 1.0, 0.0), ids(0, 1), 1), self.Q
        broken = PartialRow(NO_IDS, np.empty(0), NO_IDS, np.empty(0), float("nan"))
        assert accept([certain, broken], [Draft(0, q)], VOCAB, self.uniforms).tokens == (2,)
        with pytest.raises(BadRowError, match=r"p\[0\] has a tail of mass nan"):
            accept([broken], [], VOCAB, self.uniforms)


class TestOver:
    def test_a_part_over_no_support_is_one_over_each_that_it_holds(self) -> None:
        rng = np.random.default_rng(5)
        for _ in range(50):
            p = Row(rng.dirichlet(np.full(40, 0.5)).astype(np.float32))
            part = narrowed(p, NO_IDS, 12)
            support = np.sort(rng.permutation(part.head_ids)[: rng.integers(1, 12)])
            over = part.over(support)
            assert over is not None
            over.check(40)
            expected = narrowed(p, support, 12 - len(support))
            np.testing.assert_array_equal(over.weights, expected.weights)
            np.testing.assert_array_equal(over.head_ids, expected.head_ids)
            assert over.total == pytest.approx(float(p.total), abs=1e-12)

    def test_what_it_does_not_hold(self) -> None:
        part = narrowed(dense(0.1, 0.2, 0.3, 0.4), NO_IDS, 2)
        assert part.over(ids(1, 3)) is None
        assert part.over(ids(2, 3)) is not None
        assert narrowed(dense(0.1, 0.2, 0.3, 0.4), NO_IDS, 0).over(ids(3)) is None
        assert narrowed(dense(0.1, 0.2, 0.3, 0.4), ids(1), 3).over(ids(3)) is None

    def test_the_same_support_is_the_same_row(self) -> None:
        part = narrowed(dense(0.1, 0.2, 0.3, 0.4), ids(1, 3), 1)
        assert part.over(ids(1, 3)) is part


class TestNarrowed:
    @pytest.mark.parametrize("kind", list(PAIRS))
    def test_it_is_a_row_in_part(self, kind: str) -> None:
        rng = np.random.default_rng([7, *kind.encode()])
        for head in (*HEADS, 9):
            p_weights, q_weights = PAIRS[kind](rng)
            p, q = forms(p_weights, rng), forms(q_weights, rng)
            part = narrowed(p, q.support, head)
            part.check(VOCAB)
            known = np.concatenate([part.support, part.head_ids])
            full = p.dense(VOCAB)
            np.testing.assert_array_equal(full[known], np.concatenate([part.weights, part.head_weights]))
            rest = np.delete(full, known)
            assert part.tail_mass == pytest.approx(rest.sum(), abs=1e-15)
            assert rest.max(initial=0.0) <= part.head_weights.min(initial=np.inf)

    def test_the_row_is_left_alone(self) -> None:
        for p in (dense(0.1, 0.2, 0.3, 0.4), sparse({0: 0.5, 3: 0.5})):
            p.weights.flags.writeable = False
            before = p.weights.copy()
            narrowed(p, ids(0, 1), 1)
            np.testing.assert_array_equal(p.weights, before)

    def test_the_tail_is_summed_and_not_what_is_left_of_1(self) -> None:
        # Of a row that sums to 1.0005, by rounding.
        part = narrowed(dense(0.5005, 0.25, 0.25), NO_IDS, 1)
        assert part.tail_mass == 0.5
        assert part.total == 1.0005

    def test_the_choice_is_made_from_the_tail(self) -> None:
        seen: list[list[float]] = []

        def choice(tail: Row) -> tuple[int, float]:
            seen.append(tail.dense(4).tolist())
            return 2, 0.5

        part = narrowed(dense(0.1, 0.2, 0.3, 0.4), ids(0), 1, choice)
        assert (part.tail_winner, seen) == ((2, 0.5), [[0, 0.2, 0.3, 0]])
        assert narrowed(dense(0.1, 0.2, 0.3, 0.4), ids(0), 3, choice).tail_winner is None

    @pytest.mark.parametrize("count", [0, 1, 2, 100, 999, 2_000])
    def test_likeliest(self, count: int) -> None:
        rng = np.random.default_rng(count)
        laws = [
            np.full(2_000, 1 / 2_000),
            rng.dirichlet(np.full(2_000, 0.01)),
            np.round(rng.dirichlet(np.ones(2_000)), 4),
            np.eye(2_000)[5],
            np.zeros(2_000),
            1e-30 * rng.random(2_000),
        ]
        for weights in laws:
            order = np.lexsort((np.arange(2_000), -weights))
            expected = order[weights[order] > 0][:count]
            np.testing.assert_array_equal(likeliest(weights, count), expected)


class TestCheck:
    UNORDERED_TIES = PartialRow(ids(1, 3), np.array([0.1, 0.2]), ids(7, 0), np.array([0.3, 0.3]), 0.1)

    def test_a_good_one(self) -> None:
        good = PartialRow(ids(1, 3), np.array([0.1, 0.2]), ids(0, 7), np.array([0.3, 0.3]), 0.1, (5, 0.7))
        good.check(8)
        assert good.nbytes == partial_bytes(2, 2)

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (UNORDERED_TIES, "a head that is not in falling order"),
            (PartialRow(ids(1, 3), np.array([0.1]), ids(0), np.array([0.9]), 0.0), "1 probabilities for the 2 ids"),
            (PartialRow(NO_IDS, np.empty(0), ids(0, 1), np.array([1.0]), 0.0), "1 probabilities for the 2 ids"),
            (PartialRow(ids(8), np.array([1.0]), NO_IDS, np.empty(0), 0.0), "a token past the vocabulary of 8"),
            (PartialRow(NO_IDS, np.empty(0), ids(9), np.array([1.0]), 0.0), "a token past the vocabulary of 8"),
            (PartialRow(ids(1), np.array([0.5]), ids(1), np.array([0.5]), 0.0), "names a token twice"),
            (PartialRow(NO_IDS, np.empty(0), ids(2, 2), np.array([0.5, 0.5]), 0.0), "names a token twice"),
            (PartialRow(NO_IDS, np.empty(0), ids(2), np.array([0.5]), 0.5, (2, 1.0)), "names a token twice"),
            (PartialRow(NO_IDS, np.empty(0), NO_IDS, np.empty(0), 1.0, (8, 1.0)), "a token past the vocabulary"),
            (PartialRow(NO_IDS, np.empty(0), ids(0, 1), np.array([0.4, 0.6]), 0.0), "not in falling order"),
            (PartialRow(ids(1), np.array([np.nan]), NO_IDS, np.empty(0), 1.0), "a non-finite entry, number 0"),
            (PartialRow(ids(1), np.array([0.5]), ids(2), np.array([np.inf]), 0.0), "a non-finite entry, number 1"),
            (PartialRow(ids(1), np.array([1.0]), NO_IDS, np.empty(0), float("inf")), "a tail of mass inf"),
            (PartialRow(ids(1), np.array([1.5]), NO_IDS, np.empty(0), -0.5), "a negative entry"),
            (PartialRow(ids(1), np.array([-0.5]), NO_IDS, np.empty(0), 1.5), "a negative entry"),
            (PartialRow(ids(1), np.array([0.5]), NO_IDS, np.empty(0), 0.4), "sums to 0.9, not to 1"),
            (PartialRow(NO_IDS, np.empty(0), NO_IDS, np.empty(0), 0.0), "sums to 0, not to 1"),
        ],
    )
    def test_what_it_refuses(self, bad: PartialRow, says: str) -> None:
        with pytest.raises(BadRowError, match=says):
            bad.check(8)
