"""How many drafts the next round asks for."""

from __future__ import annotations

import functools
import logging
import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from services.coordinator.costs import RoundCosts
from services.coordinator.keeping import Floats, KeepRates, SessionKeeping
from services.coordinator.trials import Trials, Turn
from services.coordinator.types import Round

log = logging.getLogger(__name__)

# What is asked for before anything is known: enough for a line through what drafts cost.
_FIRST = 4
# Rounds with drafts in a try of them where gamma is 0. In the first the draft wakes up and takes in what it has missed.
_BURST = 3
# What that one may take and be no different, in rounds with drafts. The median of so many such rounds is believed.
_USUAL = 1.5
_WAKINGS = 9
# Rounds of each session in a trial of drafts where several run.
_TRIAL = 24
# Rounds at gamma 0 between two in which a session looks what pays, at most.
_MOST_REST = 7
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


class GammaPolicy(Protocol):
    """Chooses gamma round by round. Never looks at a draft that was not tested."""

    @property
    def stop_below(self) -> float:
        """Least probability of being kept with which one more draft pays, 0 where the draft must not stop by itself."""

    @property
    def primes(self) -> bool:
        """Whether the round that was chosen last is to fetch, at gamma 0 too, what the draft needs for the next one."""

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""


class FixedGamma:
    """Always the same."""

    stop_below = 0.0
    primes = False

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, room: int) -> int:
        """Return gamma, or what there is room for."""
        return min(self._gamma, room)

    def observe(self, done: Round) -> None:
        """Learn nothing."""


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
    """

    def __init__(self, max_gamma: int, running: Callable[[], int] = lambda: 0) -> None:
        """Know nothing.

        Args:
            max_gamma: Most drafts in a round.
            running: Tells how many requests are running.
        """
        self.max_gamma = max_gamma
        self.costs = RoundCosts(max_gamma)
        self._running = running
        # By powers of two of the requests that run.
        self._trials: dict[int, Trials] = {}
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

    def turn(self) -> Turn | None:
        """Begin a round's part in the comparison of drafts with none, for all who share passes; None for one alone.

        What each takes to pay for itself may not pay for all: who drafts comes back later than who does not, and passes
        of all fall apart into passes of few, for which the others wait. So where requests run together, drafting, as
        each thinks best, is compared with nobody's drafting by the time that a token takes.
        """
        load = self._running().bit_length()
        if load < 2:
            return None
        if load not in self._trials:
            told = functools.partial(_tell, 2 ** (load - 1))
            self._trials[load] = Trials(_TRIAL, told, alike=2 ** (load - 1))
        return self._trials[load].begin()

    def end(self, turn: Turn, done: Round) -> None:
        """Learn what a round took of which `turn` was the beginning."""
        trials = self._trials.get(self._running().bit_length())
        # The first takes the prompt in.
        if trials is not None and done.index:
            trials.end(turn, done.total_s, done.decision.accepted + 1)

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


class AdaptiveGamma:
    """The gamma that promises most tokens a second, E[tokens | gamma] / seconds(gamma), chosen anew for each round.

    Where 0 is the best, drafts are tried again now and then, so that a text that becomes easier is noticed: as often as
    costs no more than 1% of the time.
    """

    def __init__(self, speculation: Speculation) -> None:
        self.primes = False
        self._speculation = speculation
        self._keeping = SessionKeeping(speculation.rates)
        self._stop_below = 0.0
        self._drafted = False
        # Whether the last round has fetched what the draft needs. The first does, and has none: they would delay it.
        self._primed = False
        # Rounds that are still run at gamma 0 without a look; that were since the last; looks in a row that chose 0.
        self._rest, self._rested, self._looks = 0, 0, 0
        self._looked = True
        self._turn: Turn | None = None

    @property
    def stop_below(self) -> float:
        """One more draft pays where it yields more tokens than its time is worth: P(kept) >= pace x draft_s."""
        return self._stop_below

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""
        self.primes, self._turn = False, None
        limit = min(room, self._speculation.max_gamma)
        if limit <= 0:
            return 0
        self._turn = self._speculation.turn()
        if self._turn is not None and not self._turn.other:
            self._looked = False
            return 0
        self._looked = self.primes = not self._rest or self._speculation.is_trying
        if not self._looked:
            self._rest -= 1
            return 0
        gamma = self._choose(limit, room)
        self._looks = 0 if gamma else self._looks + 1
        self._rest = max(0, min(self._looks, self._speculation.costs.sessions, _MOST_REST + 1) - 1)
        # After a rest a draft that is fed with the target's hidden states has none of the last tokens.
        return gamma if self._primed else 0

    def _choose(self, limit: int, room: int) -> int:
        if not self._speculation.costs.is_known:
            return min(_FIRST, limit)
        price = self._speculation.costs.price()
        rates = self._speculation.rates
        seconds = rates.seconds(price.by_drafts[: limit + 1])
        seconds[0] = price.alone_s
        options = Options(self._keeping.reach[: limit + 1].cumsum(), seconds)
        best = options.best()
        if best and not self._drafted and self._speculation.waking_s > room * options.loss_s(0, best):
            # What is left of the answer would not pay for the beginning.
            best = 0
        self._stop_below = min(1.0, options.pace(best) * price.draft_s)
        gain_s = 0.0 if best else self._keeping.gain(seconds) * price.alone_s
        return self._speculation.probe(options, best, gain_s, awake=self._drafted)

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""
        self._primed = self.primes
        if self._turn is not None:
            self._speculation.end(self._turn, done)
        if not self._looked and not done.gamma:
            self._rested += 1
            self._speculation.rest(done)
            return
        # A drafter that is absent or busy refuses at once: that says nothing of drafts, and costs nothing to try again.
        asked = done.gamma > 0 and not (done.degraded and not done.proposed and not done.draft.elapsed_s)
        rounds, self._rested = 1 + self._rested, 0
        self._speculation.observe(done, asked=asked, steady=self._drafted)
        # A draft that lacks the target's states, or has no guess yet, has not begun.
        self._drafted = asked and (self._drafted or done.proposed > 0)
        self._keeping.observe(done.gamma if asked else 0, done.proposed, done.decision.accepted, rounds)
