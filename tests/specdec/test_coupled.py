"""The coupled choice: its noise, its law, its ties, its parts, and the rule on top of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from services.common.specdec.acceptance import BadTargetRowError, RowNeededError
from services.common.specdec.coupled import Winner, accept_coupled, better, noise, winner, winner_among
from services.common.specdec.partial import NO_IDS, AnyRow, Ids, PartialRow, narrowed
from services.common.specdec.types import Decision, Draft, Origin, Row
from tests.specdec.rows import PAIRS, VOCAB, as_sparse, dense, forms, sparse

SIGNIFICANCE = 1e-4
SEEDS = (0, 1, 2**64 - 1)
NAN_ROW = dense(0.5, np.nan, 0.25, 0.25)
ANY_Q = dense(0.25, 0.25, 0.25, 0.25)
PINNED = [0.24856369570147174, 0.3952933141038989, 0.3748904207597298]


class TestNoise:
    def test_is_a_pure_function_of_seed_position_and_id(self) -> None:
        whole = {(seed, at): noise(seed, at, 500) for seed in SEEDS for at in (0, 7, 2**32)}
        ids = np.array([499, 3, 0, 77], np.uint32)
        for (seed, at), expected in reversed(whole.items()):
            np.testing.assert_array_equal(noise(seed, at, ids), expected[ids])
            np.testing.assert_array_equal(noise(seed, at, 20), expected[:20])

    def test_is_pinned(self) -> None:
        # Workers of two releases must agree, and a change of the function changes every seeded answer.
        assert noise(1, 2, np.array([0, 1, 49_151], np.uint32)).tolist() == PINNED

    def test_no_number_comes_twice(self) -> None:
        drawn = np.concatenate([noise(seed, at, 100) for seed in (*SEEDS, 7) for at in range(50)])
        # 20,000 numbers of 52 bits: an accidental collision has probability 5e-8.
        assert len(np.unique(drawn)) == len(drawn)

    def test_is_never_0_or_1(self) -> None:
        drawn = np.concatenate([noise(seed, 0, 200_000) for seed in SEEDS])
        odd = drawn * 2**53
        assert (odd == np.floor(odd)).all()
        assert (odd % 2 == 1).all(), "an odd multiple of 2^-53 is neither 0 nor 1"
        assert 0 < drawn.min() < drawn.max() < 1

    @pytest.mark.parametrize("bits", [0, 20, 40])
    def test_is_uniform_in_its_high_bits_and_in_its_low_ones(self, bits: int) -> None:
        for seed in SEEDS:
            drawn = np.stack([noise(seed, at, 2_000) for at in range(20)])
            shifted = drawn * 2.0**bits % 1
            assert stats.kstest(shifted.ravel(), "uniform").pvalue > SIGNIFICANCE
            for each in (shifted.ravel(), shifted[:, 0], shifted[0]):
                assert stats.chisquare(np.histogram(each, bins=4, range=(0, 1))[0]).pvalue > SIGNIFICANCE

    def test_neighbours_are_independent(self) -> None:
        """Numbers of neighbouring ids, positions and seeds fill the unit square evenly, their low bits too."""
        at = np.stack([noise(11, position, 2_000) for position in range(20)])
        pairs = {
            "id, next id": (at[:, :-1], at[:, 1:]),
            "id, id in another row of a table": (at[:, :-256], at[:, 256:]),
            "position, next position": (at[:-1], at[1:]),
            "position, next position, next id": (at[:-1, :-1], at[1:, 1:]),
            "seed, next seed": (at, np.stack([noise(12, position, 2_000) for position in range(20)])),
        }
        for (name, (x, y)), bits in itertools.product(pairs.items(), (0, 30)):
            x, y = x.ravel() * 2.0**bits % 1, y.ravel() * 2.0**bits % 1
            counts = np.histogram2d(x, y, bins=8, range=((0, 1), (0, 1)))[0]
            assert stats.chisquare(counts.ravel()).pvalue > SIGNIFICANCE, f"{name}, bits from {bits}"


def gumbel(row: Row, seed: int, position: int, vocab_size: int) -> int:
    """The definition: argmax of log p + G over the support."""
    weights = row.dense(vocab_size)
    scores = np.full(vocab_size, -np.inf)
    support = weights > 0
    scores[support] = np.log(weights[support]) - np.log(-np.log1p(-noise(seed, position, vocab_size)[support]))
    return int(scores.argmax())


class TestWinner:
    @pytest.mark.parametrize("size", [1, 2, 300, 49_152])
    @pytest.mark.parametrize("spread", [0.0, 3.0, 12.0])
    def test_is_the_argmax_of_log_p_and_noise(self, size: int, spread: float) -> None:
        rng = np.random.default_rng([size, int(spread)])
        weights = np.exp(rng.normal(0, spread, size))
        weights[rng.random(size) < 0.1] = 0
        weights[0] = weights.max() or 1.0
        row = Row((weights / weights.sum()).astype(np.float32))
        for position in range(100):
            chosen = gumbel(row, 5, position, size)
            assert winner(row, 5, position).token == chosen
            assert winner(as_sparse(row), 5, position) == winner(row, 5, position)

    @pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "point masses"])
    def test_has_the_law_of_the_row_over_seeds_and_over_positions(self, kind: str) -> None:
        rng = np.random.default_rng([3, *kind.encode()])
        weights, _ = PAIRS[kind](rng)
        row = forms(weights, rng)
        expected = row.dense(VOCAB) / row.total
        for keys in ([(seed, 9) for seed in range(4_000)], [(9, at) for at in range(4_000)]):
            counts = np.bincount([winner(row, *key).token for key in keys], minlength=VOCAB)
            assert not counts[expected == 0].any()
            likely = expected * len(keys) >= 5
            observed = [*counts[likely], counts[~likely].sum()]
            wanted = [*expected[likely], expected[~likely].sum()]
            mass = [(o, w * len(keys)) for o, w in zip(observed, wanted, strict=True) if w > 0]
            if len(mass) > 1:
                assert stats.chisquare(*zip(*mass, strict=True)).pvalue > SIGNIFICANCE

    def test_of_a_long_row_has_its_law(self) -> None:
        rng = np.random.default_rng(8)
        row = Row(rng.dirichlet(np.full(2_000, 0.1)).astype(np.float32))
        drawn = np.array([winner(row, seed, 3).token for seed in range(20_000)])
        # By the probability of what was drawn: ten cells of tokens, each as likely as the others.
        order = np.argsort(-row.weights)
        cells = np.minimum(np.cumsum(row.weights[order], dtype=np.float64) * 10, 9.999).astype(int)
        of_token = np.empty(2_000, int)
        of_token[order] = cells
        expected = np.bincount(cells, row.weights[order], 10) / row.total * len(drawn)
        assert stats.chisquare(np.bincount(of_token[drawn], minlength=10), expected).pvalue > SIGNIFICANCE

    def test_of_equal_scores_the_lowest_id_wins(self) -> None:
        # Weights that equal the noise's own exponentials: every score is 1.
        ids = np.array([70, 3, 900, 4], np.uint32)
        equal = -np.log1p(-noise(1, 2, ids))
        assert winner_among(ids, equal, 1, 2) == Winner(3, 1.0)
        assert winner_among(None, -np.log1p(-noise(1, 2, 50)), 1, 2) == Winner(0, 1.0)
        assert better(Winner(5, 1.0), Winner(4, 1.0)) == better(Winner(4, 1.0), Winner(5, 1.0)) == Winner(4, 1.0)
        assert better(Winner(5, 2.0), Winner(4, 1.0)) == Winner(5, 2.0)

    def test_of_parts_is_that_of_the_whole(self) -> None:
        rng = np.random.default_rng(4)
        row = Row(rng.dirichlet(np.full(300, 0.2)).astype(np.float32))
        for position in range(300):
            parts = np.split(rng.permutation(300).astype(np.uint32), [int(rng.integers(1, 299))])
            first, second = (winner_among(ids, row.weights[ids], 6, position) for ids in parts)
            assert better(first, second) == winner(row, 6, position)

    def test_a_token_without_mass_never_wins(self) -> None:
        for position in range(200):
            assert winner(dense(0.0, 0.0, 1.0, 0.0), 1, position).token == 2
            assert winner(sparse({1: 0.0, 3: 1e-30}), 1, position).token == 3


def tokens_of(p_rows: Sequence[AnyRow], position: int, seed: int = 5) -> list[int]:
    """What the rule decides without drafts, one row at a time."""
    return [
        token for at, row in enumerate(p_rows) for token in accept_coupled([row], [], VOCAB, seed, position + at).tokens
    ]


class TestRule:
    @pytest.mark.parametrize("gamma", [1, 2, 3])
    @pytest.mark.parametrize("kind", list(PAIRS))
    def test_every_sequence_of_drafts_gives_a_prefix_of_the_same_tokens(self, kind: str, gamma: int) -> None:
        rng = np.random.default_rng([gamma, *kind.encode()])
        p_rows = [forms(PAIRS[kind](rng)[0], rng) for _ in range(gamma + 1)]
        walk = tokens_of(p_rows, position=40)
        for guess in itertools.product(range(VOCAB), repeat=gamma):
            drafts = [Draft(token, ANY_Q) for token in guess]
            kept = next((i for i in range(gamma) if guess[i] != walk[i]), gamma)
            decision = accept_coupled(p_rows, drafts, VOCAB, 5, 40)
            origin = Origin.BONUS if kept == gamma else Origin.RESIDUAL
            assert decision == Decision(tuple(walk[: kept + 1]), kept, min(kept + 1, gamma), origin)
            # Where the last row tests the last draft, no token follows it.
            short = accept_coupled(p_rows[:gamma], drafts, VOCAB, 5, 40)
            if kept == gamma:
                assert short == Decision(tuple(walk[:gamma]), gamma, gamma, Origin.ACCEPTED_DRAFT)
                assert short.origins == (Origin.ACCEPTED_DRAFT,) * gamma
            else:
                assert short == decision

    def test_a_round_without_drafts_is_the_target_alone(self) -> None:
        decision = accept_coupled([dense(0.1, 0.5, 0.2, 0.2)], [], VOCAB, 1, 0)
        assert (decision.accepted, decision.tested, decision.origin) == (0, 0, Origin.TARGET)
        assert len(decision.tokens) == 1

    def test_p_rows_are_judged_only_when_the_sequence_reaches_them(self) -> None:
        certain = dense(1.0, 0.0, 0.0, 0.0)
        wrong, right = Draft(1, ANY_Q), Draft(0, ANY_Q)
        assert accept_coupled([certain, NAN_ROW], [wrong], VOCAB, 1, 0).tokens == (0,)
        with pytest.raises(BadTargetRowError, match=r"p\[1\] has a non-finite entry at index 1"):
            accept_coupled([certain, NAN_ROW], [right], VOCAB, 1, 0)
        with pytest.raises(BadTargetRowError, match=r"p\[0\]"):
            accept_coupled([NAN_ROW], [], VOCAB, 1, 0)

    @pytest.mark.parametrize("head", [0, 1, 2])
    def test_rows_in_part_decide_what_whole_rows_do(self, head: int) -> None:
        rng = np.random.default_rng(head)
        for position in range(300):
            weights, _ = PAIRS["random"](rng)
            row = forms(weights, rng)
            support = np.sort(rng.permutation(VOCAB)[: rng.integers(0, VOCAB)]).astype(np.uint32)
            in_part = part(row, support, head, position)
            for guess in range(VOCAB):
                drafts = [Draft(guess, ANY_Q)]
                whole = accept_coupled([row, ANY_Q], drafts, VOCAB, 5, position)
                assert accept_coupled([in_part, ANY_Q], drafts, VOCAB, 5, position) == whole

    def test_a_row_in_part_without_the_winner_of_its_tail_is_needed_whole(self) -> None:
        row = dense(0.25, 0.25, 0.25, 0.25)
        with pytest.raises(RowNeededError) as needed:
            accept_coupled([narrowed(row, np.array([1], np.uint32), 1)], [], VOCAB, 5, 3)
        assert (needed.value.offset, needed.value.support) == (0, None)

    @pytest.mark.parametrize(
        ("tail_mass", "score", "says"),
        [
            (0.5, float("nan"), "a tail of mass 0.5 with a winner of score nan"),
            (0.5, float("inf"), "a tail of mass 0.5 with a winner of score inf"),
            (0.5, -1.0, "a tail of mass 0.5 with a winner of score -1.0"),
            (0.0, 2.0, "a tail of mass 0.0 with a winner of score 2.0"),
        ],
    )
    def test_a_winner_that_none_can_be_is_refused(self, tail_mass: float, score: float, says: str) -> None:
        known = np.array([1.0 - tail_mass])
        row = PartialRow(np.array([1], np.uint32), known, NO_IDS, known[:0], tail_mass, (2, score))
        with pytest.raises(BadTargetRowError, match=says):
            accept_coupled([row], [], VOCAB, 5, 3)


def part(row: Row, support: Ids, head: int, position: int) -> AnyRow:
    """The row as a target worker sends it, with its tail's winner under the noise of seed 5."""
    return narrowed(row, support, head, lambda tail: winner(tail, 5, position))


def test_noise_that_two_positions_share_makes_them_depend_on_each_other() -> None:
    """The counting above would notice: the same row at both positions then gives the same token."""
    row = dense(0.5, 0.5, 0.0, 0.0)

    def agree(shared: int) -> int:
        walks = [[winner(row, seed, at // shared).token for at in (0, 1)] for seed in range(2_000)]
        return sum(first == second for first, second in walks)

    assert stats.binomtest(agree(shared=1), 2_000, 0.5).pvalue > SIGNIFICANCE
    assert agree(shared=2) == 2_000
