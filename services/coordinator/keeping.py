"""How many drafts a round keeps, learned from those that were tested.

    E[tokens | gamma] = 1 + sum over i = 1..gamma of h_1 h_2 .. h_i

where h_i is the probability that draft i comes and is kept, given that all before it were and that the round asked for
that many (Leviathan et al. 2023, equation 1, with an alpha for each offset and for drafters that may stop early).
A round that asked for fewer says nothing about h_i, nor does one that rejected an earlier draft: an untested draft is
never looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# Rounds that the service's rates remember, and those that a request's own shift does.
_SERVICE_MEMORY = 300.0
_SESSION_MEMORY = 100.0
# Squared standard deviations that are a change, and not chance; over at most so many rounds.
_CHANGE = 11.0
_LEAST_VARIANCE = 0.25
_CHANGE_WITHIN = 20
# What nobody has seen is taken to be like the offset before it, with the weight of so many rounds.
_PRIOR_WEIGHT = 12.0
_PRIOR_RATE = 0.6
_SESSION_PRIOR_WEIGHT = 3.0


class KeepRates:
    """h_i by offset, and how many drafts come, over all requests.

    Attributes:
        rounds: How many have been learned from.
    """

    def __init__(self, max_gamma: int) -> None:
        self._kept = _Rates(max_gamma, _PRIOR_RATE)
        # A drafter gives what it is asked for, until it is seen not to.
        self._came = _Rates(max_gamma, 1.0)
        self._accepted = self._tested = 0.0
        self.rounds = 0

    @property
    def kept(self) -> Sequence[float]:
        """h_1, h_2, ...: float[max_gamma]."""
        return self._kept.values

    @property
    def came(self) -> Sequence[float]:
        """Probability that one more draft comes, given that those before it did: float[max_gamma]."""
        return self._came.values

    @property
    def alpha(self) -> float:
        """Drafts kept over drafts tested, of late; 0 where none were."""
        return self._accepted / self._tested if self._tested else 0.0

    def observe(self, gamma: int, proposed: int, accepted: int) -> None:
        """Learn from a round that asked for `gamma` drafts, got `proposed` and kept `accepted`."""
        self.rounds += 1
        self._kept.observe(gamma, accepted)
        self._came.observe(gamma, proposed)
        self._accepted += accepted - self._accepted / _SERVICE_MEMORY
        self._tested += min(accepted + 1, proposed) - self._tested / _SERVICE_MEMORY

    def forget(self, rounds: int, since: int) -> None:
        """Forget the part of so many rounds, which were among those since round `since`: they are no longer true."""
        self._kept.forget(rounds / max(1.0, self.rounds - since, self._kept.weight))


class _Rates:
    """Rates of going on from one offset to the next, of rounds that end at any offset up to their gamma."""

    def __init__(self, size: int, prior: float) -> None:
        self._prior = prior
        self._went_on = [0.0] * size
        self._seen = [0.0] * size
        self.values = [prior] * size

    def observe(self, gamma: int, count: int) -> None:
        """Learn from a round that went on `count` times of `gamma`."""
        for i in range(min(gamma, count + 1, len(self.values))):
            self._seen[i] += 1 - self._seen[i] / _SERVICE_MEMORY
            self._went_on[i] += (i < count) - self._went_on[i] / _SERVICE_MEMORY
        before = self._prior
        for i, (went_on, seen) in enumerate(zip(self._went_on, self._seen, strict=True)):
            before = self.values[i] = (went_on + _PRIOR_WEIGHT * before) / (seen + _PRIOR_WEIGHT)

    @property
    def weight(self) -> float:
        """How many rounds are remembered."""
        return self._seen[0] if self._seen else 0.0

    def forget(self, share: float) -> None:
        """Forget a share of everything."""
        self._seen = [(1 - share) * seen for seen in self._seen]
        self._went_on = [(1 - share) * went_on for went_on in self._went_on]


class SessionShift:
    """How much easier or harder than usual a request's drafts are: an odds ratio against the service's rates.

    Estimated as Mantel and Haenszel do, over the offsets of the rounds so far: sum of kept (1 - h_i) over sum of
    rejected h_i. Rounds are forgotten slowly, or all but the last k at once where these, for some k, are no chance.
    """

    def __init__(self, rates: KeepRates) -> None:
        self._rates = rates
        self._easier = 0.0
        self._harder = 0.0
        self._rounds, self._since = 0, rates.rounds
        self._last: deque[_Evidence] = deque(maxlen=_CHANGE_WITHIN)

    def observe(self, gamma: int, accepted: int) -> None:
        """Learn from a round that asked for `gamma` drafts and kept `accepted`."""
        if not gamma:
            return
        self._rounds += 1
        kept, expected = self._rates.kept, self.rates()
        easier = harder = excess = variance = 0.0
        for i in range(min(gamma, accepted + 1, len(kept))):
            excess += (i < accepted) - expected[i]
            variance += expected[i] * (1 - expected[i])
            if i < accepted:
                easier += 1 - kept[i]
            else:
                harder += kept[i]
        self._easier += easier - self._easier / _SESSION_MEMORY
        self._harder += harder - self._harder / _SESSION_MEMORY
        self._last.append(_Evidence(easier, harder, excess, variance))
        self._forget_what_changed()

    def rates(self) -> list[float]:
        """Return h_1, h_2, ... of this request."""
        first = self._rates.kept[0]
        prior = _SESSION_PRIOR_WEIGHT * first * (1 - first)
        odds = (self._easier + prior) / (self._harder + prior)
        return [odds * h / (1 - h + odds * h) for h in self._rates.kept]

    def _forget_what_changed(self) -> None:
        """Begin anew with the last k rounds whose drafts differ most from what was expected, if they differ by much."""
        easier = harder = excess = variance = worst = 0.0
        begin = (0, 0.0, 0.0)
        for k, one in enumerate(reversed(self._last), 1):
            easier += one.easier
            harder += one.harder
            excess += one.excess
            variance += one.variance
            score = excess * excess / (variance + _LEAST_VARIANCE)
            if score > worst:
                worst, begin = score, (k, easier, harder)
        if worst > _CHANGE:
            k, self._easier, self._harder = begin
            self._last.clear()
            # Nor is this what others are to expect: most of all where there are few others.
            self._rates.forget(self._rounds - k, self._since)
            self._rounds, self._since = k, self._rates.rounds - k


class _Evidence(NamedTuple):
    """Of one round: the two sums, drafts kept less those expected to be, and the variance of that."""

    easier: float
    harder: float
    excess: float
    variance: float
