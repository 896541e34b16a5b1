"""How many drafts a round keeps, learned from those that were tested.

    E[tokens | gamma] = 1 + sum over i = 1..gamma of P(the first i drafts come and are kept)

(Leviathan et al. 2023, equation 1, with an alpha for each offset and for drafters that may stop early). The log-odds of
keeping the draft at offset i are x + b_i: b is the service's, and x a request's own, one of a few levels. What is
believed of x is a probability for each level, by Bayes' rule, where in each round x may have changed (a hidden Markov
model; Adams and MacKay 2007 for such change points): a change is followed as fast as the evidence allows, and E[tokens]
is over all that x may be. A round that asked for fewer drafts says nothing of an offset, nor does one that rejected an
earlier draft: an untested draft is never looked at.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

# Log-odds of keeping the first draft, from .005 to .995 of them.
_LEVELS: Final = np.linspace(-5.0, 5.0, 32)
# Before anything is known every alpha from 0 to 1 is as likely.
_DENSITY: Final = 1 / (2 + np.exp(_LEVELS) + np.exp(-_LEVELS))
_ANY: Final = _DENSITY / _DENSITY.sum()
# Probability of a change before a round; to what is usual, or to anything.
_CHANGE: Final = 0.005
_TO_ANY: Final = 0.5
# Rounds that the service remembers.
_MEMORY: Final = 200.0
# What an offset has in common with the one before it, in rounds, and in their variance at even odds.
_PRIOR_WEIGHT: Final = 12.0
_EVEN: Final = _PRIOR_WEIGHT / 4
_MOST_ODDS: Final = 20.0
# Rounds that the service learns from at once.
_BLOCK: Final = 16


class KeepRates:
    """What is usual, over all requests.

    Attributes:
        max_gamma: Most drafts in a round.
        survival: Probability that the first i drafts come and are kept, by level: float64[levels, max_gamma + 1].
        ends: Probability that exactly i are kept of more, by i: float64[max_gamma, levels].
        tokens: Expected tokens of a round that asks for so many, by level: float64[levels, max_gamma + 1].
        changed: Probability of a change to each level before a round: float64[levels].
    """

    def __init__(self, max_gamma: int) -> None:
        self.max_gamma = max_gamma
        # Probability of each level.
        self._usual = _ANY.copy()
        self._odds, self._information = np.zeros((2, max_gamma))
        # A drafter gives what it is asked for, until it is seen not to.
        self._came, self._asked = np.full((2, max_gamma), _PRIOR_WEIGHT)
        self._block: list[_Seen] = []
        self._rounds = 0
        self._accepted = self._tested = 0.0
        self._tabulate()

    @property
    def usual(self) -> Floats:
        """What to believe of a new request: float64[levels]."""
        usual: Floats = self._usual.copy()
        return usual

    @property
    def alpha(self) -> float:
        """Drafts kept over drafts tested, of late; 0 where none were."""
        return self._accepted / self._tested if self._tested else 0.0

    def seconds(self, by_drafts: Floats) -> Floats:
        """Return what is expected of rounds that ask for 0, 1, .. drafts, from what they take with so many drafts."""
        seconds: Floats = by_drafts.copy()
        if self._all_come:
            return seconds
        seconds[1:] = by_drafts[0] + ((by_drafts[1:] - by_drafts[:-1]) * self._coming[: len(by_drafts) - 1]).cumsum()
        return seconds

    def observe(self, seen: _Seen) -> None:
        """Learn from a round of a request."""
        self._accepted += seen.accepted - self._accepted / _MEMORY
        self._tested += min(seen.accepted + 1, seen.proposed) - self._tested / _MEMORY
        self._block.append(seen)
        if len(self._block) == _BLOCK:
            self._learn()
            self._tabulate()

    def _learn(self) -> None:
        """Learn from a block of rounds."""
        self._rounds += _BLOCK
        fresh = _BLOCK / min(_MEMORY, self._rounds)
        beliefs = np.mean([seen.belief for seen in self._block], axis=0)
        self._usual += fresh * (beliefs - self._usual)
        excess, variance = np.zeros((2, self.max_gamma))
        for counts in (self._came, self._asked):
            counts += _BLOCK / _MEMORY * (_PRIOR_WEIGHT - counts)
        for gamma, proposed, accepted, reach, _ in self._block:
            tested = min(gamma, accepted + 1)
            expected = reach[1 : tested + 1] / reach[:tested]
            excess[:tested] -= expected
            excess[:accepted] += 1
            variance[:tested] += expected * (1 - expected)
            self._asked[: min(gamma, proposed + 1)] += 1
            self._came[:proposed] += 1
        self._block.clear()
        self._information += variance - _BLOCK / _MEMORY * self._information
        # A Newton step; an offset that is little known goes with the one before it.
        step = 0.0
        for i in range(1, self.max_gamma):
            step = (excess[i] + _EVEN * step) / (self._information[i] + _EVEN)
            self._odds[i] += step
        # Past these a rate is 0 or 1 in floating point, and what it rules out may still happen.
        np.clip(self._odds, -_MOST_ODDS, _MOST_ODDS, out=self._odds)

    def _tabulate(self) -> None:
        kept = 1 / (1 + np.exp(-(_LEVELS[:, None] + self._odds)))
        self.survival = np.concatenate([np.ones((len(_LEVELS), 1)), kept.cumprod(1)], axis=1)
        self.ends = np.ascontiguousarray(-np.diff(self.survival).T)
        self.tokens = self.survival.cumsum(1)
        self.changed = _CHANGE * (_TO_ANY * _ANY + (1 - _TO_ANY) * self._usual)
        self._coming = (self._came / self._asked).cumprod()
        self._all_come = bool((self._came == self._asked).all())


class SessionKeeping:
    """What is believed of one request.

    Attributes:
        reach: Probability that the first i drafts of the next round come and are kept: float64[max_gamma + 1].
    """

    def __init__(self, rates: KeepRates) -> None:
        self._rates = rates
        self._belief = rates.usual
        self.reach: Floats = self._belief @ rates.survival

    def observe(self, gamma: int, proposed: int, accepted: int, rounds: int = 1) -> None:
        """Learn from a round that asked for `gamma` drafts, 0 too, got `proposed` and kept `accepted`.

        Args:
            gamma: Asked for.
            proposed: That came.
            accepted: That were kept.
            rounds: How many there were since the last that was observed, this one included.
        """
        rates, belief = self._rates, self._belief
        if gamma := min(gamma, rates.max_gamma):
            proposed, accepted = min(gamma, proposed), min(gamma, accepted)
            belief = belief * (rates.ends[accepted] if accepted < gamma else rates.survival[:, gamma])
            belief /= belief.sum()
            rates.observe(_Seen(gamma, proposed, accepted, self.reach, belief))
        same = (1 - _CHANGE) ** rounds
        self._belief = belief * same + rates.changed * ((1 - same) / _CHANGE)
        self.reach = self._belief @ rates.survival

    def gain(self, seconds: Floats) -> float:
        """Return what the best gamma for whatever x is may bring over gamma 0, in tokens of a round of that.

        Args:
            seconds: Of rounds that ask for 0, 1, .. drafts.
        """
        paces = self._rates.tokens[:, : len(seconds)] / seconds
        return float(self._belief @ paces.max(1)) * float(seconds[0]) - 1


class _Seen(NamedTuple):
    """Of a round: drafts asked for, that came, and kept; what was believed of `reach` before, and of x after it."""

    gamma: int
    proposed: int
    accepted: int
    reach: Floats
    belief: Floats
