"""Counting tests: is the next token, given its context, drawn from p? And how surely would they notice if not?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

SIGNIFICANCE = 1e-4
LEAST_EXPECTED = 5.0
Counts = npt.NDArray[np.int64]
Law = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    """What one test found.

    Attributes:
        name: What was counted.
        n: How many observations.
        statistic: Of Pearson.
        df: Degrees of freedom.
        p_value: Probability of as large a statistic if the law holds.
    """

    name: str
    n: int
    statistic: float
    df: int
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= SIGNIFICANCE

    def __str__(self) -> str:
        return f"{self.name:<28} n={self.n:<8} chi2={self.statistic:<9.1f} df={self.df:<5} p={self.p_value:.3g}"


def chi_square(name: str, observed: Counts, law: Law) -> Verdict:
    """Test counts against a law, row by row. Contexts that have the same law are counted as one.

    Cells of a row that expect fewer than 5 are counted as one; a cell of probability 0 that was seen is a certain
    failure.

    Args:
        name: What was counted.
        observed: int64[contexts, cells].
        law: float64[contexts, cells], each row a distribution: of the cell, given the context.
    """
    n = int(observed.sum())
    if observed[law == 0].any():
        return Verdict(name, n, float("inf"), 0, 0.0)
    observed, law = _grouped(observed, law)
    statistic, df = 0.0, 0
    for counts, expected in zip(observed, observed.sum(axis=1, keepdims=True) * law, strict=True):
        counts, expected = _merge_rare(counts, expected)
        statistic += float(((counts - expected) ** 2 / expected).sum())
        df += max(0, len(expected) - 1)
    return Verdict(name, n, statistic, df, float(stats.chi2.sf(statistic, df)) if df else 1.0)


def _grouped(observed: Counts, law: Law) -> tuple[Counts, Law]:
    """Return counts and laws with the contexts of equal laws made one."""
    rows, index = np.unique(law, axis=0, return_inverse=True)
    grouped = np.zeros(rows.shape, np.int64)
    np.add.at(grouped, index.ravel(), observed)
    return grouped, rows


def _merge_rare(counts: Counts, expected: Law) -> tuple[Counts, Law]:
    """Return the cells of one row with the rare ones made one; none where all of them together are rare."""
    order = np.argsort(expected)
    order = order[expected[order] > 0]
    counts, expected = counts[order], expected[order]
    if expected.sum() < LEAST_EXPECTED:
        return counts[:0], expected[:0]
    merged = int((expected < LEAST_EXPECTED).sum())
    if expected[:merged].sum() < LEAST_EXPECTED:
        merged += 1  # the rare ones together are still rare: the smallest of the others joins them
    return (
        np.concatenate([[counts[:merged].sum()], counts[merged:]]),
        np.concatenate([[expected[:merged].sum()], expected[merged:]]),
    )


def power(observed: Counts, law: Law, shift: float) -> float:
    """Return the probability that `chi_square` notices a bias, for the bias that is hardest to notice.

    The bias moves `shift` of probability from one token to another in every context, between the two tokens where that
    changes the statistic least. The statistic is then noncentral chi-square.

    Args:
        observed: int64[contexts, tokens]; only how often each context was seen matters.
        law: float64[contexts, tokens].
        shift: Probability moved.
    """
    observed, law = _grouped(observed, law)
    noncentrality, df = 0.0, 0
    for n, p in zip(observed.sum(axis=1), law, strict=True):
        largest = np.sort(p[p > 0])[::-1]
        if len(largest) < 2 or n * largest[-1] < LEAST_EXPECTED:
            continue
        noncentrality += n * shift**2 * (1 / largest[0] + 1 / largest[1])
        df += len(largest) - 1
    if not df:
        return 0.0
    return float(stats.ncx2.sf(stats.chi2.isf(SIGNIFICANCE, df), df, noncentrality))


@dataclass(frozen=True)
class Answers:
    """The tokens of many answers to one prompt, and where in its round each was emitted.

    Attributes:
        prompt: The two tokens before every answer.
        tokens: int64[answers, length].
        offsets: int64[answers, length], offset in the round.
    """

    prompt: tuple[int, int]
    tokens: Counts
    offsets: Counts

    def contexts(self) -> Counts:
        """Return the two tokens before each token: int64[answers, length, 2]."""
        before = np.tile(np.array(self.prompt, np.int64), (len(self.tokens), 1))
        whole = np.concatenate([before, self.tokens], axis=1)
        return np.stack([whole[:, :-2], whole[:, 1:-1]], axis=2)

    def by_context(self, vocab_size: int, where: npt.NDArray[np.bool_] | None = None) -> Counts:
        """Count next tokens by context: int64[vocab * vocab, vocab]."""
        context = self.contexts()
        index = (context[..., 0] * vocab_size + context[..., 1]) * vocab_size + self.tokens
        chosen = index if where is None else index[where]
        return np.bincount(chosen.ravel(), minlength=vocab_size**3).reshape(-1, vocab_size)


def verdicts(answers: Answers, p: Law) -> Iterator[Verdict]:
    """Yield every test of the answers.

    Next token given its context, pooled and by offset in the round; the joint law of the answer's first tokens; the
    joint law of three tokens in a row given the context before them, wherever they lie in their rounds, and again where
    they begin a round.

    Args:
        answers: What was generated.
        p: float64[vocab, vocab, vocab], the target's law.
    """
    vocab_size = len(p)
    flat = p.reshape(-1, vocab_size)
    yield chi_square("next token", answers.by_context(vocab_size), flat)
    for offset in range(int(answers.offsets.max()) + 1):
        where = answers.offsets == offset
        yield chi_square(f"next token, offset {offset}", answers.by_context(vocab_size, where), flat)
    triples = joint(p, 3)
    length = answers.tokens.shape[1] - 2
    in_a_row = sum(answers.tokens[:, i : length + i] * vocab_size ** (2 - i) for i in range(3))
    context = answers.contexts()[:, :length]
    index = (context[..., 0] * vocab_size + context[..., 1]) * vocab_size**3 + in_a_row

    def count(chosen: Counts) -> Counts:
        return np.bincount(chosen.ravel(), minlength=triples.size).reshape(triples.shape)

    yield chi_square("first three tokens", count(index[:, 0]), triples)
    # Triples must not overlap, and where they begin must not depend on what is in them.
    yield chi_square("three in a row", count(index[:, ::3]), triples)
    yield chi_square("three from a round's start", count(index[_starts(answers.offsets[:, :length])]), triples)


def joint(p: Law, count: int) -> Law:
    """Return the law of `count` tokens in a row given the two before: float64[vocab^2, vocab^count]."""
    vocab_size = len(p)
    if count == 1:
        return p.reshape(-1, vocab_size)
    # One more token makes the context (a, b) the context (b, c), and the rest follows from there.
    rest = joint(p, count - 1).reshape(vocab_size, vocab_size, -1)
    law: Law = np.einsum("abc,bcr->abcr", p, rest).reshape(vocab_size**2, -1)
    return law


def _starts(offsets: Counts) -> npt.NDArray[np.bool_]:
    """Return where a round begins that the last chosen triple does not reach into."""
    chosen = np.zeros(offsets.shape, bool)
    free_from = np.zeros(len(offsets), np.int64)
    for position in range(offsets.shape[1]):
        chosen[:, position] = (offsets[:, position] == 0) & (position >= free_from)
        free_from = np.where(chosen[:, position], position + 3, free_from)
    return chosen
