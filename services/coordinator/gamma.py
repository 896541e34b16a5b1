"""How many drafts the next round asks for."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from services.coordinator.costs import Price, RoundCosts
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
# The same at a load that has been measured in few passes.
_NEW_LOAD, _NEW_LOAD_PAUSE = 12, 1


class GammaPolicy(Protocol):
    """Chooses gamma round by round. Never looks at a draft that was not tested."""

    @property
    def stop_below(self) -> float:
        """Least probability of being kept with which one more draft pays, 0 where the draft must not stop by itself."""

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""


class FixedGamma:
    """Always the same."""

    stop_below = 0.0

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, room: int) -> int:
        """Return gamma, or what there is room for."""
        return min(self._gamma, room)

    def observe(self, done: Round) -> None:
        """Learn nothing."""


class Options(NamedTuple):
    """What each gamma promises, from 0 on."""

    tokens: list[float]
    seconds: list[float]

    def pace(self, gamma: int) -> float:
        """Return tokens a second."""
        return self.tokens[gamma] / self.seconds[gamma]

    def best(self, first: int = 0) -> int:
        """Return the gamma from `first` on with the best pace."""
        return max(range(first, len(self.tokens)), key=self.pace)

    def loss_s(self, gamma: int, best: int) -> float:
        """Return the time that a round loses with a gamma that is not the best."""
        return self.seconds[gamma] - self.tokens[gamma] / self.pace(best)


class Speculation:
    """What the service knows of speculation: shared by the requests that are alike, in one event loop.

    Attributes:
        max_gamma: Most drafts in a round.
        costs: Of a round.
        rates: Of keeping drafts.
    """

    def __init__(self, max_gamma: int) -> None:
        self.max_gamma = max_gamma
        self.costs = RoundCosts()
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
            self._credit_s += done.total_s * self.costs.sessions

    def probe(self, options: Options, best: int) -> int | None:
        """Return another gamma to try, to know what it costs; None for none now.

        All sessions that share a pass try it together: what one alone brings hardly changes the pass.
        """
        sessions = self.costs.sessions
        if self._rounds < self._probe_until:
            return self._probe if self._probe < len(options.tokens) else None
        pause = _SERVICE_PAUSE if self.costs.measured > _NEW_LOAD else _NEW_LOAD_PAUSE
        if self._rounds - self._probed < pause * sessions:
            return None
        others = {0, best // 2, best + 2} - {best}
        gamma = min((g for g in others if g < len(options.tokens)), key=lambda g: self._last[g], default=best)
        loss_s = options.loss_s(gamma, best) * sessions
        if gamma == best or loss_s > self._credit_s:
            return None
        self._credit_s -= loss_s
        self._probed = self._rounds
        self._probe, self._probe_until = gamma, self._rounds + sessions
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
        self._stop_below = 0.0

    @property
    def stop_below(self) -> float:
        """One more draft pays where it yields more tokens than its time is worth: P(kept) >= pace x draft_s."""
        return self._stop_below

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""
        limit = min(room, self._speculation.max_gamma)
        if limit <= 0:
            return 0
        if not self._speculation.costs.is_known:
            return min(_FIRST, limit)
        price = self._speculation.costs.price()
        options = self._options(limit, price)
        best = options.best()
        self._stop_below = min(1.0, options.pace(best) * price.draft_s)
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

    def _options(self, limit: int, price: Price) -> Options:
        came, kept = self._speculation.rates.came, self._shift.rates()
        tokens, seconds = [1.0], [price.alone_s]
        expected, reached, drafts, coming = 1.0, 1.0, 0.0, 1.0
        asked_s = price.asked_s + (1 - came[0]) * price.without_s
        for i in range(limit):
            coming *= came[i]
            drafts += coming
            reached *= kept[i]
            expected += reached
            tokens.append(expected)
            seconds.append(asked_s + drafts * price.draft_s)
        return Options(tokens, seconds)

    def _own_probe(self, options: Options) -> int:
        """Return 0, or the least costly other gamma where it is time to test drafts again."""
        gamma = options.best(1)
        # All that share the pass wait for it.
        loss_s = options.loss_s(gamma, 0) * self._speculation.costs.sessions
        if not self._try_again and (self._untested < _OWN_PAUSE or loss_s > self._credit_s):
            return 0
        self._try_again = False
        self._credit_s -= loss_s
        return gamma
