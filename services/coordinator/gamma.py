"""How many drafts the next round asks for."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.coordinator.costs import RoundCosts
from services.coordinator.keeping import KeepRates, SessionShift
from services.coordinator.types import Round

# What is asked for before anything is known.
_FIRST = 4
# Share of the time that may be lost to rounds run only to learn: by a request about its drafts, by all about costs.
_OWN_SHARE = 0.015
_SERVICE_SHARE = 0.005
# Rounds between two of them.
_OWN_PAUSE = 4
_SERVICE_PAUSE = 6


class GammaPolicy(Protocol):
    """Chooses gamma round by round. Never looks at a draft that was not tested."""

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""


class FixedGamma:
    """Always the same."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, room: int) -> int:
        """Return gamma, or what there is room for."""
        return min(self._gamma, room)

    def observe(self, done: Round) -> None:
        """Learn nothing."""


class Option(NamedTuple):
    """What a gamma promises: tokens and seconds of a round."""

    tokens: float
    seconds: float

    @property
    def pace(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Speculation:
    """What the service knows of speculation: shared by the requests that are alike, in one event loop.

    Attributes:
        max_gamma: Most drafts in a round.
        costs: Of a round.
        rates: Of keeping drafts.
    """

    def __init__(self, max_gamma: int) -> None:
        self.max_gamma = max_gamma
        self.costs = RoundCosts(max_gamma)
        self.rates = KeepRates(max_gamma)
        self._credit_s = 0.0
        self._load = 0
        self._rounds = 0
        self._probed = 0
        self._last = [-(10**6)] * (max_gamma + 1)
        self._probe, self._probe_until = 0, 0

    def observe(self, done: Round, *, asked: bool) -> None:
        """Learn from a round of any request."""
        self._rounds += 1
        self._last[min(done.gamma, self.max_gamma)] = self._rounds
        self.costs.observe(done, asked=asked)
        if asked:
            self.rates.observe(done.gamma, done.proposed, done.decision.accepted)
        self._credit_s += _SERVICE_SHARE * done.total_s
        if self.costs.load != self._load:
            # Under another load everything may cost otherwise: a round's time to find out.
            self._load = self.costs.load
            self._credit_s += done.total_s * self._load
            self._probed = 0

    def probe(self, options: list[Option], best: int) -> int | None:
        """Return another gamma to try, to know what it costs; None for none now.

        All sessions that share a pass try it together: what one alone brings hardly changes the pass.
        """
        if self._rounds < self._probe_until:
            return self._probe if self._probe < len(options) else None
        if self._rounds - self._probed < _SERVICE_PAUSE * self.costs.sessions:
            return None
        others = {0, best // 2, best + 2} - {best}
        gamma = min((other for other in others if other < len(options)), key=lambda other: self._last[other], default=0)
        loss_s = options[gamma].seconds - options[gamma].tokens / options[best].pace
        if gamma == best or loss_s * self.costs.sessions > self._credit_s:
            return None
        self._credit_s -= loss_s * self.costs.sessions
        self._probed = self._rounds
        self._probe, self._probe_until = gamma, self._rounds + self.costs.sessions
        return gamma


class AdaptiveGamma:
    """The gamma that promises most tokens a second, E[tokens | gamma] / seconds(gamma), chosen anew for each round.

    Where 0 is the best, drafts are tried again now and then, so that a text that becomes easier is noticed: as often as
    costs no more than 1.5% of the time.
    """

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._shift = SessionShift(speculation.rates)
        self._credit_s = 0.0
        self._untested = 0
        self._try_again = False

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""
        limit = min(room, self._speculation.max_gamma)
        if limit <= 0:
            return 0
        if not self._speculation.costs.is_known:
            return min(_FIRST, limit)
        options = self._options(limit)
        best = max(range(limit + 1), key=lambda gamma: options[gamma].pace)
        if best == 0:
            return self._own_probe(options)
        other = self._speculation.probe(options, best)
        return best if other is None else other

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""
        # A drafter that is absent or busy refuses at once: that says nothing of drafts, and costs nothing to try again.
        asked = done.gamma > 0 and not (done.degraded and not done.proposed and not done.draft.elapsed_s)
        self._speculation.observe(done, asked=asked)
        self._credit_s += _OWN_SHARE * done.total_s
        if asked:
            self._shift.observe(done.gamma, done.decision.accepted)
            self._untested = 0
            self._try_again = done.decision.accepted >= done.gamma
        else:
            self._untested += 1

    def _options(self, limit: int) -> list[Option]:
        costs, came, kept = self._speculation.costs, self._speculation.rates.came, self._shift.rates()
        options = [Option(1.0, costs.seconds(0, asked=False))]
        tokens, reached, drafts, coming = 1.0, 1.0, 0.0, 1.0
        for i in range(limit):
            coming *= came[i]
            drafts += coming
            reached *= kept[i]
            tokens += reached
            options.append(Option(tokens, costs.seconds(drafts, asked=True)))
        return options

    def _own_probe(self, options: list[Option]) -> int:
        """Return 0, or the least costly other gamma where it is time to test drafts again."""
        gamma = max(range(1, len(options)), key=lambda other: options[other].pace)
        loss_s = options[gamma].seconds - options[gamma].tokens / options[0].pace
        if not self._try_again and (self._untested < _OWN_PAUSE or loss_s > self._credit_s):
            return 0
        self._try_again = False
        self._credit_s -= loss_s
        return gamma
