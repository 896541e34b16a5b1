"""How many drafts the next round asks for."""

from __future__ import annotations

from typing import Protocol

from services.coordinator.keeping import SessionKeeping
from services.coordinator.speculation import Options, Speculation
from services.coordinator.trials import Trials, Turn
from services.coordinator.types import Round

# What is asked for before anything is known: enough for a line through what drafts cost.
_FIRST = 4
# Rounds at gamma 0 between two in which a session looks what pays, at most.
_MOST_REST = 7


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
        self._trials: Trials | None = None
        self._turn, self._turn_is_over = Turn(other=True, trial=0), True

    @property
    def stop_below(self) -> float:
        """One more draft pays where it yields more tokens than its time is worth: P(kept) >= pace x draft_s."""
        return self._stop_below

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""
        self.primes = False
        limit = min(room, self._speculation.max_gamma)
        if limit <= 0:
            return 0
        trials, before = self._speculation.trials(), self._trials
        self._trials = trials
        if trials is not None:
            if self._turn_is_over or trials is not before:
                # Drafting that runs ahead chooses within a round: that begins no other.
                self._turn, self._turn_is_over = trials.begin(), False
            if not self._turn.other:
                # Now and then what such a round takes is learned.
                self._looked = self._rested >= _MOST_REST
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
        self._turn_is_over = True
        # The first round takes the prompt in. Drafts that ran ahead may come from before the trial.
        if self._trials is not None and done.index and (self._turn.other or not done.gamma):
            self._trials.end(self._turn, done.total_s, done.decision.accepted + 1)
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
