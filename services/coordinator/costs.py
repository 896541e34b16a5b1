"""What a round costs, learned from the rounds that were run.

    seconds(n drafts) = drafting(n) + verifying(n)

`verifying` is the target's call, as seen from here: queue, pass and wire. `drafting` is all the rest of the round, what
it waits for its drafts above all. Both are curves of their own for every load, for a pass that is bound by memory costs
the same over one position or five and one that is bound by compute does not. When sessions share a pass, each position
delays them all, so n drafts cost what a pass takes in which every session brings n + 1 positions: a gamma that pays for
one session and costs the others more does not pay.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from services.coordinator.keeping import Floats
from services.coordinator.types import Round

# Measurements that a curve remembers, and with which something is known.
_MEMORY: Final = 120.0
_FEW: Final = 4
# Measurements that count as much as the belief that an n is on the line, and that the line is where it was thought.
_OWN_WEIGHT: Final = 3.0
_PRIOR_WEIGHT: Final = 0.1
# Times differ by such a share of them until it is known better, and by no less than the other at any time.
_SPREAD, _LEAST_SPREAD = 0.25, 0.05
# In standard deviations: what one measurement counts at most; what is no drift; and the sum of the rest that is a
# change: four that count most, running.
_MOST, _SLACK, _CHANGE = 3.0, 0.5, 8.0
# One pass, as far as shares add up to one.
_ONE: Final = 1.001
# A curve is drawn anew when such a share of it is news.
_NEWS: Final = 1 / 16
# Share of the sessions in a round by which the load follows them.
_BATCH_GAIN: Final = 0.3
# Positions of a text that is new to a worker, or back after a pause: their pass says nothing of gamma.
_CATCHING_UP: Final = 64
# No round takes less. A line through few points may say that one takes no time at all.
_LEAST_S: Final = 1e-6


class CostCurve:
    """Seconds as a function of n = 0, 1, 2, ...: near a line, and each n where it was measured.

    The mean time at n differs from the line as much as times differ from their mean, over `_OWN_WEIGHT`: an n that was
    hardly measured is on the line, which is the least squares one of what was measured of late. So a pass over one
    position may take another code path, and positions be free up to a point. Neither slope nor level of the line is
    below 0. Where times go on being longer, or shorter, than the curve says (a cumulative sum, Page 1954), all before
    that began is forgotten.

    Attributes:
        level: The line's seconds at 0.
        slope: Seconds more for each.
        seconds: The curve: float64[size].
        weight: How many measurements are remembered.
    """

    def __init__(self, size: int, level: float | None = None, slope: float | None = None) -> None:
        """Believe in a line until more is known; None for no belief."""
        self._believed = level, slope
        self.level, self.slope, self.weight = level or 0.0, slope or 0.0, 0.0
        self._n = np.arange(size, dtype=np.float64)
        # Sums of weights, and of seconds, at each n.
        self._known = np.zeros((2, size))
        self._total_s = self._news = 0.0
        self._spread = _SPREAD**2
        # By direction: the sum, and what was measured since it was 0.
        self._longer, self._shorter = _Drift(1), _Drift(-1)
        self._held: list[tuple[int, float, float]] = []
        self._draw()

    def observe(self, n: float, seconds: float, share: float = 1.0) -> None:
        """Learn from one measurement, which counts for less where others saw the same pass."""
        at = round(n)
        # To what it would be at a whole n.
        seconds = max(_LEAST_S, seconds + self.slope * (at - n))
        if self._believed[1] is None and n:
            # At first n take n times as long.
            self._believed = self._believed[0], seconds / n
        if not self._is_accident(at, seconds, share):
            for one in self._held or [(at, seconds, share)]:
                self._learn(*one)
            self._held = []

    def _is_accident(self, n: int, seconds: float, share: float) -> bool:
        """Return whether a time is far too long, unless the one before was; then both are held to be true."""
        if not self.weight or seconds <= self._expected[n] * (1 + _MOST * math.sqrt(self._spread)):
            self._held = []
            return False
        self._held.append((n, seconds, share))
        return sum(share for _, _, share in self._held) <= _ONE

    def _learn(self, n: int, seconds: float, share: float) -> None:
        if not self.weight:
            self._add(n, seconds, share)
        elif self.weight < _FEW and seconds * (1 + _MOST * math.sqrt(self._spread)) < self._expected[n]:
            # No accident makes a time short: what came before was one.
            self._begin_anew([(n, seconds, share)])
        elif believed := self._believable(n, seconds, share):
            fade = 1 - share / _MEMORY
            self._known *= fade
            self.weight *= fade
            self._total_s *= fade
            self._add(n, believed, share)
        if self._news >= _NEWS * self.weight:
            self._draw()

    def doubt_s(self) -> Floats:
        """Return the standard deviations of the curve: float64[size]."""
        doubt_s: Floats = np.sqrt(self._spread * self._doubt) * (self._total_s / self.weight)
        return doubt_s

    def _add(self, n: int, seconds: float, share: float) -> None:
        self._known[0, n] += share
        self._known[1, n] += share * seconds
        self.weight += share
        self._total_s += share * seconds
        self._news += share

    def _believable(self, n: int, seconds: float, share: float) -> float:
        """Return what of a measurement is to be believed; 0 after a change, when all that came since is known."""
        expected, typical = self._expected[n], self._total_s / self.weight
        deviation = math.sqrt(self._spread * (expected * expected + self._doubts[n] * typical * typical))
        score = max(-_MOST, min(_MOST, (seconds - expected) / deviation))
        self._spread += share / _MEMORY * (max(_LEAST_SPREAD**2, score * score * self._spread) - self._spread)
        if self.weight >= _FEW:
            for drift in (self._longer, self._shorter):
                if drift.add(score, n, seconds, share):
                    self._begin_anew(drift.since)
                    return 0.0
        return expected + score * deviation

    def _begin_anew(self, since: list[tuple[int, float, float]]) -> None:
        """Know only what was measured since a change; believe in the same line but for a factor."""
        by = sum(share * seconds for _, seconds, share in since)
        by /= sum(share * self._expected[n] for n, _, share in since)
        self._believed = self.level * by, self.slope * by
        self._known[:] = 0.0
        self.weight = self._total_s = 0.0
        for one in since:
            self._add(*one)
        self._longer, self._shorter = _Drift(1), _Drift(-1)

    def _draw(self) -> None:
        """Fit the line, to the means at each n, and draw the curve between the two."""
        n, (weight, seconds) = self._n, self._known
        together = weight + _OWN_WEIGHT
        apart = _OWN_WEIGHT / together
        level, slope = self._believed
        w_level, w_slope = _PRIOR_WEIGHT * (level is not None), _PRIOR_WEIGHT * (slope is not None)
        line_weight, line_seconds = weight * apart, seconds * apart
        a, b = float(line_weight.sum()) + w_level, float(line_weight @ n)
        d = float(line_weight @ (n * n)) + w_slope
        t = float(line_seconds.sum()) + w_level * (level or 0.0)
        u = float(line_seconds @ n) + w_slope * (slope or 0.0)
        determinant = max(1e-9, a * d - b * b)
        self.level, self.slope = (d * t - b * u) / determinant, (a * u - b * t) / determinant
        if self.slope < 0:
            self.level, self.slope = t / a, 0.0
        elif self.level < 0:
            self.level, self.slope = 0.0, u / d
        elif not d:
            self.level = t / max(1e-9, a)
        self.seconds: Floats = np.maximum(_LEAST_S, apart * (self.level + self.slope * n) + seconds / together)
        self._expected: list[float] = self.seconds.tolist()
        self._doubt: Floats = 1 / together + apart * apart * (d - 2 * b * n + a * n * n) / determinant
        self._doubts: list[float] = self._doubt.tolist()
        self._news = 0.0


class _Drift:
    """A cumulative sum of what is too long, or too short, and what was measured since it was 0."""

    def __init__(self, way: int) -> None:
        self._way = way
        self._sum = 0.0
        self.since: list[tuple[int, float, float]] = []

    def add(self, score: float, n: int, seconds: float, share: float) -> bool:
        """Add one measurement; return whether this is a change."""
        self._sum += share * (self._way * score - _SLACK)
        if self._sum <= 0:
            self._sum = 0.0
            self.since.clear()
            return False
        self.since.append((n, seconds, share))
        return self._sum > _CHANGE


class Price(NamedTuple):
    """What a round takes, in seconds; more than 0 for any number of drafts.

    Attributes:
        alone_s: Without asking for drafts.
        asked_s: With drafts asked for, and none coming.
        draft_s: For one more draft, a step of the draft and a position of the target's pass.
        by_drafts: With so many drafts: float64[max_gamma + 1].
    """

    alone_s: float
    asked_s: float
    draft_s: float
    by_drafts: Floats


class RoundCosts:
    """Seconds of a round by its drafts, at the load of the moment. Shared by all requests."""

    def __init__(self, max_gamma: int) -> None:
        self._size = max_gamma + 1
        self._batch = 1.0
        # By load: that of the target's passes as powers of two of the sessions in one.
        self._drafting: dict[int, CostCurve] = {}
        self._verifying: dict[int, CostCurve] = {}
        self._idle = CostCurve(1, slope=0.0)
        self._drafted = 0

    @property
    def sessions(self) -> int:
        """Sessions that share a pass of the target, as of late."""
        return max(1, round(self._batch))

    @property
    def load(self) -> int:
        """Which power of two that is."""
        return self.sessions.bit_length()

    @property
    def is_known(self) -> bool:
        """Whether drafts have been timed, more than once: a first time may be an accident."""
        return self._drafted >= _FEW and bool(self._verifying)

    def follow(self, done: Round) -> None:
        """Learn from a round how many sessions share a pass."""
        if done.index and (sessions := done.target.batch_size):
            self._batch += _BATCH_GAIN / sessions * (sessions - self._batch)

    def observe(self, done: Round, *, asked: bool, steady: bool = True) -> None:
        """Learn from a round what it cost.

        Args:
            done: The round.
            asked: Whether a drafter was asked; one that is absent costs nothing.
            steady: Whether it was asked in the last round too. A draft that was not has to wake up, to read its
                weights anew and to take in the text since: a round by itself says little of what many would cost.
        """
        target, draft = done.target, done.draft
        if done.index == 0 or not target.elapsed_s:
            # The first round opens sessions and takes the prompt in.
            return
        sessions = max(1, target.batch_size)
        load = sessions.bit_length()
        brought = target.pass_tokens / sessions - 1 if target.pass_tokens else done.proposed
        # More than drafts: others in the pass took a prompt in.
        if target.forward_tokens <= done.proposed + _CATCHING_UP and 0 <= brought <= self._size - 1:
            self._curve(self._verifying, load, 0.0).observe(brought, target.elapsed_s, 1 / sessions)
        rest_s = done.total_s - target.elapsed_s
        if not asked:
            self._idle.observe(0, rest_s)
        elif (steady or not done.proposed) and draft.forward_tokens <= done.proposed + _CATCHING_UP:
            self._drafted += 1
            self._curve(self._drafting, load, None).observe(min(done.proposed, self._size - 1), rest_s)

    @property
    def alone_s(self) -> float | None:
        """What a round without drafts takes now; None until that is known."""
        if not self.is_known:
            return None
        return float(_nearest(self._verifying, self.load).seconds[0] + self._idle.seconds[0])

    def price(self) -> Price:
        """Return what a round takes now. Only where `is_known`."""
        verifying, drafting = _nearest(self._verifying, self.load), _nearest(self._drafting, self.load)
        by_drafts = verifying.seconds + drafting.seconds
        return Price(
            alone_s=float(verifying.seconds[0] + self._idle.seconds[0]),
            asked_s=float(by_drafts[0]),
            draft_s=verifying.slope + drafting.slope,
            by_drafts=by_drafts,
        )

    def doubt_s(self) -> Floats:
        """Return the standard deviations of the seconds of a round with so many drafts: float64[max_gamma + 1]."""
        verifying, drafting = _nearest(self._verifying, self.load), _nearest(self._drafting, self.load)
        both_s: Floats = np.hypot(verifying.doubt_s(), drafting.doubt_s())
        return both_s

    def _curve(self, curves: dict[int, CostCurve], load: int, slope: float | None) -> CostCurve:
        """Return the curve of a load; of a new one the line of the nearest is believed, or a slope."""
        if load not in curves:
            nearest = _nearest(curves, load) if curves else None
            believed = (nearest.level, nearest.slope) if nearest else (None, slope)
            curves[load] = CostCurve(self._size, *believed)
        return curves[load]


def _nearest(curves: dict[int, CostCurve], load: int) -> CostCurve:
    if load in curves:
        return curves[load]
    # A copy, for this is also read by the thread that exports metrics.
    return curves[min(tuple(curves), key=lambda known: abs(known - load))]
