"""What a round costs, learned from the rounds that were run.

    seconds(n drafts) = drafting(n) + verifying(n)

`verifying` is the target's call, as seen from here: queue, pass and wire. `drafting` is all the rest of the round, what
it waits for its drafts above all. Both are straight lines in n with a level of their own for every load, for a pass
that is bound by memory costs the same over one position or five and one that is bound by compute does not. When
sessions share a pass, each position delays them all, so n drafts cost what a pass takes in which every session brings
n + 1 positions: a gamma that pays for one session and costs the others more does not pay.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.coordinator.types import Round

# Measurements that a line remembers; those that the slope it believed before counts as, each one draft from their mean;
# and those at 0 of which half is taken for a difference there.
_MEMORY: Final = 120.0
_PRIOR_WEIGHT: Final = 4.0
_ZERO_WEIGHT: Final = 6.0
# A time this many times what was expected is a pause of the machine, unless the next one is as long: then it is a
# change, and what was known counts as one measurement.
_LONG: Final = 1.6
# Measurements after which a second change does away with what was known before the first.
_SETTLED: Final = 10.0
# Share of the sessions in a round by which the load follows them.
_BATCH_GAIN: Final = 0.3
# Positions of a text that is new to a worker, or back after a pause: their pass says nothing of gamma.
_CATCHING_UP: Final = 64
# No round takes less. A line through few points may say that one takes no time at all.
_LEAST_S: Final = 1e-6


class CostLine:
    """Seconds as a function of n = 0, 1, 2, ...: level + slope n, least squares over what was measured of late.

    n = 0 stands apart, by a difference of its own: a pass over one position may take another code path, and a drafter
    without a guess does nothing. Neither slope nor level is ever below 0.

    Attributes:
        level: The line's seconds at 0.
        slope: Seconds more for each.
        without: Seconds at 0 beyond the line's.
    """

    def __init__(self, slope: float | None = None) -> None:
        """Know nothing but a slope; None believes, until more is known, that n take n times as long."""
        self.level = 0.0
        self.slope = 0.0
        self.without = 0.0
        self._believed = slope
        self._line = _Points(0.0, 0.0, 0.0, 0.0, 0.0)
        self._zeros = _Points(0.0, 0.0, 0.0, 0.0, 0.0)
        self._strange = 0.0
        self._doubted: tuple[float | None, _Points, _Points] | None = None

    @property
    def weight(self) -> float:
        """How many measurements are remembered."""
        return self._line.weight + self._zeros.weight

    def seconds(self, n: float) -> float:
        """Return what n takes."""
        return self.level + self.slope * n if n else self.level + self.without

    def observe(self, n: float, seconds: float, share: float = 1.0) -> None:
        """Learn from one measurement, which counts for less where others saw the same pass."""
        if self.weight and self._is_accident(seconds / max(_LEAST_S, self.seconds(n)), share):
            return
        keep = 1 - share / _MEMORY
        seen = _Points(share, n, seconds, 0.0, 0.0)
        self._line, self._zeros = self._line.faded(keep), self._zeros.faded(keep)
        if n:
            self._line = self._line.joined(seen)
        else:
            self._zeros = self._zeros.joined(seen)
        self._fit()

    def _fit(self) -> None:
        # Few points at 0 are taken for points of the line, many for a difference.
        trust = self._zeros.weight**2 / (self._zeros.weight**2 + _ZERO_WEIGHT**2)
        points = self._line.joined(self._zeros.faded(1 - trust))
        # The line goes through the means: it is no steeper than from nothing at 0.
        steepest = points.seconds / points.n if points.n else 0.0
        if self._believed is None and steepest:
            self._believed = steepest
        slope = (points.product + _PRIOR_WEIGHT * (self._believed or 0.0)) / (points.spread + _PRIOR_WEIGHT)
        self.slope = max(0.0, min(slope, steepest) if steepest else slope)
        self.level = points.seconds - self.slope * points.n
        self.without = trust * (self._zeros.seconds - self.level)

    def _is_accident(self, surprise: float, share: float) -> bool:
        """Return whether a time is far too long and the one before was not; where both are, doubt what was known."""
        if surprise > _LONG:
            self._strange += share
            if self._strange <= 1:
                return True
            self._doubt()
            return False
        self._strange = 0.0
        if surprise < 1 / _LONG and self._doubted is not None:
            # There were two accidents in a row, or a change is over.
            self._believed, self._line, self._zeros = self._doubted
            self._doubted = None
        return False

    def _doubt(self) -> None:
        """Believe the slope, and little of the rest."""
        if self._doubted is None or self.weight > _SETTLED:
            self._doubted = self._believed, self._line, self._zeros
        self._believed = self.slope
        keep = min(1.0, 1 / self.weight)
        self._line, self._zeros = self._line.faded(keep), self._zeros.faded(keep)


class _Points(NamedTuple):
    """Measurements: how many, their means, and sums of squares and products about the means."""

    weight: float
    n: float
    seconds: float
    spread: float
    product: float

    def faded(self, keep: float) -> _Points:
        """Return them with less weight."""
        return self._replace(weight=self.weight * keep, spread=self.spread * keep, product=self.product * keep)

    def joined(self, other: _Points) -> _Points:
        """Return these and others (Chan et al. 1979)."""
        weight = self.weight + other.weight
        if not weight:
            return self
        share = other.weight / weight
        n, seconds = other.n - self.n, other.seconds - self.seconds
        apart = self.weight * share
        return _Points(
            weight,
            self.n + share * n,
            self.seconds + share * seconds,
            self.spread + other.spread + apart * n * n,
            self.product + other.product + apart * n * seconds,
        )


class Price(NamedTuple):
    """What a round takes, in seconds; more than 0 for any number of drafts.

    Attributes:
        alone_s: Without asking for drafts.
        asked_s: With drafts, besides the drafts.
        without_s: That much more where none come.
        draft_s: For each draft, a step of the draft and a position of the target's pass.
    """

    alone_s: float
    asked_s: float
    without_s: float
    draft_s: float


class RoundCosts:
    """Seconds of a round by its drafts, at the load of the moment. Shared by all requests."""

    def __init__(self) -> None:
        self._batch = 1.0
        # By load: that of the target's passes as powers of two of the sessions in one.
        self._drafting: dict[int, CostLine] = {}
        self._verifying: dict[int, CostLine] = {}
        self._idle = CostLine(0.0)

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
        """Whether a draft has been timed."""
        return bool(self._drafting and self._verifying)

    @property
    def measured(self) -> float:
        """How many passes at the load of the moment are remembered."""
        return _nearest(self._verifying, self.load).weight if self._verifying else 0.0

    def observe(self, done: Round, *, asked: bool) -> None:
        """Learn from a round.

        Args:
            done: The round.
            asked: Whether a drafter was asked; one that is absent costs nothing.
        """
        target, draft = done.target, done.draft
        if done.index == 0 or not target.elapsed_s:
            # The first round opens sessions and takes the prompt in.
            return
        if target.batch_size:
            self._batch += _BATCH_GAIN / target.batch_size * (target.batch_size - self._batch)
        sessions = max(1, target.batch_size)
        load = sessions.bit_length()
        if target.forward_tokens <= done.proposed + _CATCHING_UP:
            brought = target.pass_tokens / sessions - 1 if target.pass_tokens else done.proposed
            if brought <= done.proposed + _CATCHING_UP:
                _line(self._verifying, load, 0.0).observe(max(0.0, brought), target.elapsed_s, 1 / sessions)
        rest_s = done.total_s - target.elapsed_s
        if not asked:
            self._idle.observe(0, rest_s)
        elif draft.forward_tokens <= done.proposed + _CATCHING_UP:
            _line(self._drafting, load, None).observe(done.proposed, rest_s)

    def price(self) -> Price:
        """Return what a round takes now. Only where `is_known`."""
        verifying, drafting = _nearest(self._verifying, self.load), _nearest(self._drafting, self.load)
        asked_s = max(_LEAST_S, verifying.level + drafting.level)
        return Price(
            alone_s=max(_LEAST_S, verifying.seconds(0) + self._idle.seconds(0)),
            asked_s=asked_s,
            without_s=max(_LEAST_S - asked_s, verifying.without + drafting.without),
            draft_s=verifying.slope + drafting.slope,
        )


def _nearest(lines: dict[int, CostLine], load: int) -> CostLine:
    # A copy, for this is also read by the thread that exports metrics.
    return lines[min(tuple(lines), key=lambda known: abs(known - load))]


def _line(lines: dict[int, CostLine], load: int, first: float | None) -> CostLine:
    """Return the line of a load; of a new one only the slope is believed, that of the nearest."""
    if load not in lines:
        lines[load] = CostLine(_nearest(lines, load).slope if lines else first)
    return lines[load]
