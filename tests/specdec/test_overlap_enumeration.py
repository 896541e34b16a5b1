"""Drafting that runs ahead, by enumeration: every draft, every branch, every drop; the law of the text is p.

The drafts x are verified while y1..yk are drafted after them. Gamma and k of a round depend on all that was dropped
before it, and whether y1 has come and how many after it on the text and the drafts so far: the worst of clocks.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from services.common.specdec.acceptance import accept_probability, residual
from services.common.specdec.types import Row

VOCAB, LENGTH = 3, 4

Tokens: TypeAlias = tuple[int, ...]
Weights: TypeAlias = npt.NDArray[np.float64]
Tests: TypeAlias = Callable[["Service", Tokens, Tokens, Tokens], bool]
Keeps: TypeAlias = Callable[[Tokens], Tokens]


def pick(*seen: object) -> int:
    """1 or 2, by anything at all: the same for the same."""
    return 1 + zlib.crc32(repr(seen).encode()) % 2


def by_the_clock(service: Service, text: Tokens, x: Tokens, y: Tokens) -> bool:
    """Whether y1 has come: it may depend on all that was decided before y1 was sampled."""
    return pick("arrival", text, x) == 1


def always(service: Service, text: Tokens, x: Tokens, y: Tokens) -> bool:
    return True


def unless_unlikely(service: Service, text: Tokens, x: Tokens, y: Tokens) -> bool:
    """The forbidden swap: the bonus token where p(y1) < q(y1)."""
    return bool(service.p(text + x)[y[0]] >= service.q(text + x)[y[0]])


def as_they_are(held: Tokens) -> Tokens:
    return held


def but_not_token_0(held: Tokens) -> Tokens:
    """Also forbidden: what is held is looked at before it is tested."""
    return held if held[:1] != (0,) else ()


@dataclass
class Service:
    """A target and a draft, each with a law of its own after every text.

    Attributes:
        rng: Of the laws.
        tests: Whether the last row tests y1.
        keeps: What of y2..yk goes into the next round.
    """

    rng: np.random.Generator
    tests: Tests = by_the_clock
    keeps: Keeps = as_they_are
    rows: dict[tuple[str, Tokens], Weights] = field(default_factory=dict)
    laws: dict[object, Weights] = field(default_factory=dict)

    def p(self, text: Tokens) -> Weights:
        return self._row("p", text)

    def q(self, text: Tokens) -> Weights:
        return self._row("q", text)

    def _row(self, which: str, text: Tokens) -> Weights:
        if (which, text) not in self.rows:
            weights = self.rng.dirichlet(np.full(VOCAB, 0.7))
            if self.rng.random() < 0.3:
                weights[self.rng.integers(VOCAB)] = 0
            self.rows[which, text] = weights / weights.sum()
        return self.rows[which, text]

    def drafted(self, text: Tokens, count: int) -> list[tuple[float, Tokens]]:
        """Every proposal of `count` tokens with its probability."""
        every = []
        for tokens in itertools.product(range(VOCAB), repeat=count):
            probability = float(np.prod([self.q(text + tokens[:i])[x] for i, x in enumerate(tokens)]))
            if probability > 0:
                every.append((probability, tokens))
        return every

    def law(self, text: Tokens, held: Tokens, gamma: int) -> Weights:
        """The law of whole texts of LENGTH tokens from the start of a round: float64[VOCAB ** LENGTH].

        Args:
            text: What is committed.
            held: Drafts y2..yk of the round before.
            gamma: Drafts to make where none are held.
        """
        if len(text) >= LENGTH:
            return np.eye(VOCAB**LENGTH)[int("".join(map(str, text[:LENGTH])), VOCAB)]
        key = (text, held, gamma)
        if key not in self.laws:
            rounds = [(1.0, held)] if held else self.drafted(text, gamma)
            self.laws[key] = sum(
                probability * drafted * self._round(text, x, y)
                for probability, x in rounds
                for drafted, y in self.drafted(text + x, pick("ahead", text, x))
            )
        return self.laws[key]

    def _round(self, text: Tokens, x: Tokens, y: Tokens) -> Weights:
        """The same, given the drafts of the round and those that ran ahead."""
        law = np.zeros(VOCAB**LENGTH)
        tested = x + y[:1] if self.tests(self, text, x, y) else x
        alive = 1.0
        for i, draft in enumerate(tested):
            seen = text + tested[:i]
            p, q = self.p(seen), self.q(seen)
            keep = accept_probability(float(p[draft]), float(q[draft]))
            if keep < 1:
                replacement = residual(Row(p), Row(q)).dense(VOCAB)
                law += alive * (1 - keep) * self._mixed(seen, replacement, dropped=x[i:] + y)
            alive *= keep
        if tested == x:
            return law + alive * self._mixed(text + x, self.p(text + x), dropped=y)
        came = pick("came", text, x, y[0]) - 1
        return law + alive * self.law(text + tested, self.keeps(y[1 : 1 + came]), pick(tested, y))

    def _mixed(self, text: Tokens, weights: Weights, dropped: Tokens) -> Weights:
        """Over the token that ends a round; the next one's gamma depends on what was dropped."""
        shares = weights / weights.sum()
        laws = [self.law((*text, z), (), pick(text, dropped)) if shares[z] > 0 else 0.0 for z in range(VOCAB)]
        return np.asarray(sum(share * law for share, law in zip(shares, laws, strict=True)))

    def target_law(self) -> Weights:
        """The law of whole texts under p alone."""
        texts = itertools.product(range(VOCAB), repeat=LENGTH)
        return np.array([np.prod([self.p(text[:i])[z] for i, z in enumerate(text)]) for text in texts])


def distance(service: Service) -> float:
    """Total variation between the service's law and the target's."""
    law = service.law((), (), 1)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    return float(np.abs(law - service.target_law()).sum() / 2)


@pytest.mark.parametrize("tests", [by_the_clock, always])
@pytest.mark.parametrize("seed", range(6))
def test_the_law_is_p_whatever_runs_ahead(seed: int, tests: Tests) -> None:
    service = Service(np.random.default_rng(seed), tests)
    assert distance(service) < 1e-12
    # Rounds of one and of two drafts, with and without held ones, were among them.
    assert {(bool(held), gamma) for _, held, gamma in service.laws} >= {(False, 1), (False, 2), (True, 1), (True, 2)}


def test_a_bonus_in_place_of_an_unlikely_draft_is_seen() -> None:
    assert distance(Service(np.random.default_rng(3), unless_unlikely)) == pytest.approx(0.059, abs=1e-3)


def test_dropping_held_drafts_by_their_value_is_seen() -> None:
    assert distance(Service(np.random.default_rng(1), always, but_not_token_0)) > 0.05
