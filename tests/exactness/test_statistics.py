"""The counting itself, without a service: it passes what is p, finds what is not, and as often as it says."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy import stats

from services.common.specdec.acceptance import accept
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, SamplingParams
from tests.exactness.collect import MODES, law_for
from tests.support.laws import Law, context, process
from tests.support.statistics import SIGNIFICANCE, Answers, chi_square, joint, power, verdicts

P = np.array([[0.5, 0.3, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25]])


def draw(rng: np.random.Generator, visits: list[int], law: np.ndarray) -> np.ndarray:
    return np.array([rng.multinomial(n, row) for n, row in zip(visits, law, strict=True)])


def test_p_values_are_uniform_where_the_law_holds() -> None:
    rng = np.random.default_rng(0)
    found = [chi_square("", draw(rng, [300, 500], P), P).p_value for _ in range(2_000)]
    assert stats.kstest(found, "uniform").pvalue > SIGNIFICANCE


def test_power_is_as_computed() -> None:
    rng = np.random.default_rng(1)
    visits, shift = [1_600, 2_400], 0.035
    # The bias that is hardest to notice: between the two largest of each row.
    biased = P + np.array([[-shift, shift, 0, 0], [-shift, shift, 0, 0]])
    found = [chi_square("", draw(rng, visits, biased), P).p_value < SIGNIFICANCE for _ in range(1_000)]
    expected = power(draw(rng, visits, P), P, shift)
    assert 0.5 < expected < 0.99
    assert np.mean(found) == pytest.approx(expected, abs=0.04)


def test_a_token_outside_the_support_is_certain_failure() -> None:
    counts = np.array([[500, 300, 200, 1], [250, 250, 250, 250]])
    assert chi_square("", counts, P).p_value == 0


def test_rare_cells_are_counted_together() -> None:
    law = np.array([[0.9, 0.05, 0.03, 0.02], [0.7, 0.1, 0.1, 0.1]])
    assert chi_square("", np.array([[90, 5, 3, 2], [0, 0, 0, 0]]), law).df == 2 - 1 + 1  # 5; 3 + 2; 90
    assert chi_square("", np.array([[45, 2, 2, 1], [2, 1, 1, 0]]), law).df == 1  # 5 in all against 45; nothing
    assert chi_square("", np.array([[2, 1, 0, 0], [0, 0, 0, 0]]), law).p_value == 1


def test_contexts_of_one_law_are_counted_together() -> None:
    law = np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]])
    counts = np.array([[60, 40], [40, 60], [90, 10]])
    assert (chi_square("", counts, law).statistic, chi_square("", counts, law).df) == (0, 2)


def test_joint_law() -> None:
    p = np.random.default_rng(2).dirichlet(np.ones(3), (3, 3))
    law = joint(p, 3).reshape((3,) * 5)
    for a, b, c, d, e in np.ndindex(law.shape):
        assert law[a, b, c, d, e] == pytest.approx(p[a, b, c] * p[b, c, d] * p[c, d, e])


def test_counts_by_context_and_offset() -> None:
    answers = Answers((0, 1), np.array([[2, 0, 1]]), np.array([[0, 1, 0]]))
    counts = answers.by_context(3).reshape(3, 3, 3)
    assert np.argwhere(counts).tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    later = answers.by_context(3, answers.offsets == 1).reshape(3, 3, 3)
    assert np.argwhere(later).tolist() == [[1, 2, 0]]


def rounds(law: Law, params: SamplingParams, gamma: int, seed: int, length: int) -> tuple[list[int], list[int]]:
    """The rule in memory: what the service has to do over the wire."""
    tokens, index = [0, 1], 0
    offsets: list[int] = []
    while len(offsets) < length:
        drafts: list[Draft] = []
        for offset in range(gamma):
            q = law.q_rows(params)[context([*tokens, *(d.token for d in drafts)])]
            drafts.append(Draft(sample(q, uniform(seed, index, offset, Purpose.DRAFT)), q))
        known = [*tokens, *(d.token for d in drafts)]
        p_rows = [law.p_rows(params)[context(known[: len(tokens) + i])] for i in range(gamma + 1)]
        decision = accept(p_rows, drafts, law.vocab_size, functools.partial(uniform, seed, index))
        tokens += decision.tokens
        offsets += range(len(decision.tokens))
        index += 1
    return tokens[2 : length + 2], offsets[:length]


@pytest.mark.parametrize("mode", MODES)
def test_the_rule_in_memory_passes(mode: str) -> None:
    law = law_for(3)
    played = [rounds(law, MODES[mode], 3, seed, 60) for seed in range(60)]
    answers = Answers((0, 1), np.array([tokens for tokens, _ in played]), np.array([offsets for _, offsets in played]))
    assert all(verdict.passed for verdict in verdicts(answers, law.p(MODES[mode])))


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_the_laws_reach_late_offsets_and_reject_often(mode: str, gamma: int) -> None:
    law = law_for(gamma)
    assert 0.75 < law.alpha(MODES[mode]) < 0.96
    assert law.visits(MODES[mode]).min() > 0.003


class TestProcess:
    LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3]))

    def probabilities(self, **params: float) -> list[float]:
        return [round(float(x), 6) for x in process(self.LOGITS, SamplingParams(**params))]  # type: ignore[arg-type]

    def test_plain(self) -> None:
        assert self.probabilities() == [0.1, 0.4, 0.2, 0.3]

    def test_temperature(self) -> None:
        assert self.probabilities(temperature=0.5) == [0.033333, 0.533333, 0.133333, 0.3]
        assert self.probabilities(temperature=0) == [0, 1, 0, 0]

    def test_top_k(self) -> None:
        assert self.probabilities(top_k=2) == [0, 0.571429, 0, 0.428571]
        assert self.probabilities(top_k=9) == [0.1, 0.4, 0.2, 0.3]

    def test_top_p_keeps_the_head_and_the_token_that_crosses(self) -> None:
        assert self.probabilities(top_p=0.65) == [0, 0.571429, 0, 0.428571]
        assert self.probabilities(top_p=0.75) == [0, 0.444444, 0.222222, 0.333333]
        assert self.probabilities(top_p=0.01) == [0, 1, 0, 0]

    def test_min_p(self) -> None:
        assert self.probabilities(min_p=0.6) == [0, 0.571429, 0, 0.428571]
