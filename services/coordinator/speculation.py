"""What the service knows of speculation: what drafts bring and cost, when others are tried, whether they pay at all."""

from __future__ import annotations

import functools
import logging
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from services.coordinator.costs import RoundCosts
from services.coordinator.keeping import Floats, KeepRates
from services.coordinator.trials import Trials
from services.coordinator.types import Round

log = logging.getLogger(__name__)

# Rounds with drafts in a try of them where gamma is 0. In the first the draft wakes up and takes in what it has missed.
_BURST = 3
# What that one may take and be no different, in rounds with drafts. The median of so many such rounds is believed.
_USUAL = 1.5
_WAKINGS = 9
# Rounds of each session in a trial of drafts where several run.
_TRIAL = 16
# Share of the time that may be lost to rounds run only to learn.
_SHARE = 0.01
# Tries that the account holds at most.
_TRIES = 2
# Rounds for which a gain is counted when it is decided whether to look for it.
_HORIZON = 2.0
# Rounds between two that are run to learn what they cost; and of how many standard deviations that may be less.
_PAUSE = 6
_DOUBT = 2.0
# It is never less than this share of what is thought.
_LEAST_SHARE = 0.5


class Options(NamedTuple):
    """What each gamma promises, from 0 on.

    Attributes:
        tokens: float64[gammas].
        seconds: float64[gammas].
    """

    tokens: Floats
    seconds: Floats

    def best(self, first: int = 0) -> int:
        """Return the gamma from `first` on with most tokens a second."""
        return first + int((self.tokens[first:] / self.seconds[first:]).argmax())

    def pace(self, gamma: int) -> float:
        """Return tokens a second."""
        return float(self.tokens[gamma] / self.seconds[gamma])

    def loss_s(self, gamma: int, best: int) -> float:
        """Return the time that a round loses with a gamma that is not the best."""
        return float(self.seconds[gamma]) - float(self.tokens[gamma]) / self.pace(best)


class Speculation:
    """What the service knows of speculation: shared by the requests that are alike, in one event loop.

    Attributes:
        max_gamma: Most drafts in a round.
        costs: Of a round.
        rates: Of keeping drafts.
        sharing: Requests that share this, and run now.
    """

    def __init__(self, max_gamma: int, running: Callable[[], int] = lambda: 0) -> None:
        """Know nothing.

        Args:
            max_gamma: Most drafts in a round.
            running: Tells how many requests are running.
        """
        self.max_gamma = max_gamma
        self.costs = RoundCosts(max_gamma)
        self.sharing = 0
        self._running = running
        # By powers of two of the requests that run, and of those of them that share this.
        self._trials: dict[tuple[int, int], Trials] = {}
        self.rates = KeepRates(max_gamma)
        self._credit_s = 0.0
        self._rounds = 0
        self._probed = 0
        # What is tried, until when; how many have yet to, and what time its tokens are worth.
        self._probe, self._probe_until = 0, 0
        self._owing, self._worth_s = 0, 0.0
        # By load. A few of no time at first: one alone may be an accident.
        self._wakings_s: dict[int, deque[float]] = {}

    @property
    def is_trying(self) -> bool:
        """Whether another gamma than the best is being tried."""
        return self._rounds < self._probe_until

    def trials(self) -> Trials | None:
        """Return the comparison of drafts with none that the load of the moment has; None for one request alone.

        What pays for each may not pay for all: who drafts comes back later than who does not, and passes of all fall
        apart into passes of few, for which the others wait. So where requests run together, drafting, as each thinks
        best, is compared with nobody's drafting by the time that a token takes.
        """
        running, sharing = self._load
        if running < 2:
            return None
        if (running, sharing) not in self._trials:
            told = functools.partial(_tell, 2 ** (running - 1))
            self._trials[running, sharing] = Trials(_TRIAL, told, alike=2 ** (sharing - 1))
        return self._trials[running, sharing]

    @property
    def alone_s(self) -> float | None:
        """What a token takes now where nobody drafts; None until that is known."""
        trials = self._trials.get(self._load)
        usual_s = trials.usual_s if trials is not None else None
        return self.costs.alone_s if usual_s is None else usual_s

    @property
    def _load(self) -> tuple[int, int]:
        return self._running().bit_length(), max(1, self.sharing).bit_length()

    def leave(self) -> None:
        """Know of a request that it is over."""
        self.sharing -= 1

    @property
    def waking_s(self) -> float:
        """What the first round with drafts after a rest takes more than others, at the load of the moment."""
        known_s = self._wakings_s.get(self.costs.load)
        return statistics.median(known_s) if known_s else 0.0

    def rest(self, done: Round) -> None:
        """Count a round, and the load. That is all there is to learn from one of many without drafts."""
        self._rounds += 1
        self.costs.follow(done)
        self._credit_s += _SHARE * done.total_s
        if self._rounds > self._probe_until + self.costs.sessions:
            # Rounds of it that never came: requests end, and have less room at their ends.
            self._owing = 0

    def observe(self, done: Round, *, asked: bool, steady: bool = True) -> None:
        """Learn from a round of any request; see `RoundCosts.observe`."""
        self.rest(done)
        self.costs.observe(done, asked=asked, steady=steady)
        if not self.costs.is_known:
            return
        is_tried = self._owing > 0 and done.gamma == self._probe
        # The first round takes the prompt in, at the target too.
        wakes = asked and not steady and done.proposed > 0 and done.index > 0
        if not is_tried and not wakes:
            return
        price = self.costs.price()
        took_s = float(price.by_drafts[min(done.proposed, self.max_gamma)] if done.gamma else price.alone_s)
        if wakes:
            more_s = max(0.0, done.total_s - _USUAL * took_s)
            self._wakings_s.setdefault(self.costs.load, deque([0.0] * 3, _WAKINGS)).append(more_s)
        if is_tried:
            self._owing -= 1
            # Not what this one took: it may have met with an accident.
            self._credit_s -= max(0.0, took_s + wakes * self.waking_s - self._worth_s)

    def probe(self, options: Options, best: int, gain_s: float = 0.0, *, awake: bool = True) -> int:
        """Return the gamma to take: the best, or now and then another, to know what it costs and brings.

        All sessions that share a pass try another together: what one alone brings hardly changes the pass.

        Args:
            options: What is expected.
            best: The best of them.
            gain_s: What a round may gain by drafts, by what is believed; of a request whose best is 0.
            awake: Its last round has asked for drafts.
        """
        sessions = self.costs.sessions
        if self.is_trying:
            return min(self._probe, len(options.tokens) - 1)
        waking_s = (sessions - awake) * self.waking_s
        # Enough for the dearest try. More would be spent all at once, after hours in which nothing had to be tried.
        most_s = _TRIES * (_BURST * sessions * float(options.seconds.max()) + waking_s)
        self._credit_s = min(self._credit_s, most_s)
        waited = self._rounds - self._probed >= _PAUSE * sessions
        if best and not waited:
            return best
        may_lose_s = _HORIZON * gain_s + (self._credit_s if waited else min(0.0, self._credit_s))
        hopeful = self._hopeful(options) if waited else options
        if best:
            # Looked for once in a while, found or not.
            self._probed = self._rounds
            gamma = hopeful.best()
            loss_s = options.loss_s(gamma, best)
        else:
            gamma = options.best(1)
            loss_s = hopeful.loss_s(gamma, 0)
        tries = sessions if best else _BURST * sessions
        if gamma == best or loss_s * tries + (0.0 if best else waking_s) > may_lose_s:
            return best
        self._probed = self._rounds
        # Those who rest need a round more, see `AdaptiveGamma.primes`.
        self._probe, self._probe_until = gamma, self._rounds + tries + (0 if best or sessions == 1 else sessions)
        self._owing = self._probe_until - self._rounds
        self._worth_s = float(options.tokens[gamma]) / options.pace(best)
        return gamma

    def _hopeful(self, options: Options) -> Options:
        """Return them with each taking as much less as may be, for all that is known."""
        least_s = options.seconds - _DOUBT * self.costs.doubt_s()[: len(options.seconds)]
        np.maximum(least_s, _LEAST_SHARE * options.seconds, out=least_s)
        # More drafts never take less.
        np.maximum.accumulate(least_s[1:], out=least_s[1:])
        return options._replace(seconds=least_s)


def _tell(running: int, drafts: bool, with_s: float, without_s: float) -> None:
    log.info(
        "%d requests or more at a time %s: a token takes %.2f ms with drafts, %.2f ms without",
        *(running, "draft" if drafts else "do not draft", with_s * 1e3, without_s * 1e3),
    )
