"""What a round costs, learned from the rounds that were run.

    seconds(n drafts) = drafting(n) + verifying(n)

`verifying` is the target's call, as seen from here: queue, pass and wire. `drafting` is all the rest of the round, what
it waits for its drafts above all. Both depend on how many sessions share a pass. When sessions share one, each position
delays them all, so the cost of n drafts is what a pass takes in which every session brings n + 1 positions: a gamma
that pays for one session and costs the others more does not pay.
"""

from __future__ import annotations

from services.coordinator.types import Round

# Share of a surprise that moves the level at once; what stays moves the shape.
_LEVEL_GAIN = 0.03
# Most observations that a point of the shape counts as, and those that the line through all points counts as.
_MEMORY = 50.0
_AGEING = 0.003
_LINE_WEIGHT = 5.0
# A time this many times what was expected is a pause of the machine, unless the next one is as long: then it is a
# change, and what was known is doubted.
_LONG = 1.6
# A time this many times what was expected is a level that was wrong.
_SHORT = 0.6
# Of a line that rises: as much as a point at 1 seen so often.
_FLAT_WEIGHT = 5.0
_BATCH_GAIN = 0.1
# Positions of a text that is new to a worker, or back after a pause: their pass says nothing of gamma.
_CATCHING_UP = 64
# No round takes less. A line through few points may say that one takes no time at all.
_LEAST_S = 1e-6


class CostCurve:
    """Seconds as a function of n = 0, 1, 2, ...: a level, times a shape.

    A machine that becomes slower makes everything slower, those n too that have not been run since. So the level takes
    some of what differs from expectation, and the shape is what remains. The shape is a line through the points where
    little is known, and the points themselves where they have been seen often. Point 0 stands apart: a pass over one
    position may take another code path, and a drafter without a guess does nothing.
    """

    def __init__(self, size: int, *, proportional: bool) -> None:
        """Know nothing.

        Args:
            size: Points: n from 0 to size - 1.
            proportional: Believe, until more is known, that n things take n times as long; else that all take the same.
        """
        self._proportional = proportional
        self._level = 0.0
        self._points = [0.0] * size
        self._weights = [0.0] * size
        self._fitted: list[float] = []
        self._strange = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything has been observed."""
        return self._level > 0

    def observe(self, n: int, seconds: float, share: float = 1.0) -> None:
        """Learn from one measurement, which counts for less where others saw the same pass."""
        if not self._level:
            self._level, self._points[n], self._weights[n] = seconds, 1.0, share
            self._fitted = []
            return
        expected = self.seconds(n)
        surprise = seconds / expected if expected > 0 else 1.0
        if self._is_accident(surprise, share):
            return
        weight = self._weights[n]
        self._weights = [known * (1 - _AGEING * share) for known in self._weights]
        self._points[n] += share * (seconds / self._level - self._points[n]) / (weight + share)
        self._weights[n] = min(weight + share, _MEMORY)
        # A time may be too long by chance, never by half too short. A point that is new says nothing about the level.
        gain = _LEVEL_GAIN * weight / (weight + _LINE_WEIGHT) if surprise > _SHORT else min(0.5, 0.5 * weight)
        self._level *= 1 + share * gain * (min(surprise, _LONG) - 1)
        self._fitted = []

    def _is_accident(self, surprise: float, share: float) -> bool:
        """Return whether a time is far too long and those just before were not; where they were, believe it quickly."""
        if surprise < _LONG:
            self._strange = 0.0
            return False
        self._strange += share
        if self._strange <= 1:
            return True
        self._doubt()
        return False

    def _doubt(self) -> None:
        """Believe little of what was known: least where drafts are, so that what is new is taken for their price first.

        That is soon found out where it is wrong, for fewer drafts are tried next.
        """
        self._weights = [min(known, 0.1 if n else 1.0) for n, known in enumerate(self._weights)]

    def seconds(self, n: float) -> float:
        """Return what n takes; between two points, in proportion."""
        if not self._fitted:
            self._fitted = self._fit()
        below = min(int(n), len(self._fitted) - 1)
        above = min(below + 1, len(self._fitted) - 1)
        between = n - int(n)
        return self._level * ((1 - between) * self._fitted[below] + between * self._fitted[above])

    def copied(self) -> CostCurve:
        """Return a curve that begins where this one is, sure of little."""
        copy = CostCurve(len(self._points), proportional=self._proportional)
        copy._level, copy._points = self._level, list(self._points)
        copy._weights = list(self._weights)
        copy._doubt()
        return copy

    def _fit(self) -> list[float]:
        intercept, slope = self._line()
        fitted = []
        for n, (point, weight) in enumerate(zip(self._points, self._weights, strict=True)):
            trust = weight / (weight + (_LINE_WEIGHT if n else 0.5))
            fitted.append(trust * point + (1 - trust) * (intercept + slope * n))
        return fitted

    def _line(self) -> tuple[float, float]:
        """Return intercept and slope of the weighted least squares line, with the prior as a point at 0 or a ridge."""
        # Not the whole weight on point 0: it is only a hint of what 1 takes. It stands at 0 until it has been seen.
        total = max(min(self._weights[0], 10.0), float(self._proportional))
        sum_x, sum_y, sum_xy = 0.0, total * self._points[0], 0.0
        sum_xx = 0.0 if self._proportional else _FLAT_WEIGHT
        for n in range(1, len(self._points)):
            weight = self._weights[n]
            if weight:
                total += weight
                sum_x += weight * n
                sum_y += weight * self._points[n]
                sum_xx += weight * n * n
                sum_xy += weight * n * self._points[n]
        if not total:
            return 0.0, 0.0
        spread = sum_xx - sum_x * sum_x / total
        slope = max(0.0, (sum_xy - sum_x * sum_y / total) / spread) if spread > 0 else 0.0
        intercept = (sum_y - slope * sum_x) / total
        # Neither is ever below 0: one distant point that was slow must not make the near ones free.
        return (intercept, slope) if intercept >= 0 else (0.0, sum_xy / sum_xx)


class RoundCosts:
    """Seconds of a round by its drafts, at the load of the moment. Shared by all requests."""

    def __init__(self, max_gamma: int) -> None:
        self._size = max_gamma + 1
        self._batch = 1.0
        # By load: that of the workers' passes as powers of two of the sessions in one.
        self._drafting: dict[int, CostCurve] = {}
        self._verifying: dict[int, CostCurve] = {}
        self._idle = CostCurve(1, proportional=False)

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
        """Whether drafting and verifying have been timed."""
        both = (self._drafting, self._verifying)
        return all(any(curve.is_known for curve in curves.values()) for curves in both)

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
            self._batch += _BATCH_GAIN * (target.batch_size - self._batch)
        load = max(1, target.batch_size).bit_length()
        if target.forward_tokens <= done.proposed + _CATCHING_UP:
            brought = target.pass_tokens / target.batch_size - 1 if target.pass_tokens else done.proposed
            if brought < self._size:
                _curve(self._verifying, load, self._size, proportional=False).observe(
                    round(brought), target.elapsed_s, max(1, target.batch_size) ** -0.5
                )
        rest_s = done.total_s - target.elapsed_s
        if not asked:
            self._idle.observe(0, rest_s)
        elif draft.forward_tokens <= done.proposed + _CATCHING_UP:
            curve = _curve(self._drafting, load, self._size, proportional=True)
            curve.observe(min(done.proposed, self._size - 1), rest_s)

    def seconds(self, drafts: float, *, asked: bool) -> float:
        """Return what a round takes, more than 0.

        Args:
            drafts: How many there are to be verified, on average.
            asked: Whether the drafter is asked.
        """
        verifying = _nearest(self._verifying, self.load)
        verify_s = max(_LEAST_S, verifying.seconds(drafts)) if verifying else _LEAST_S
        if not asked:
            return verify_s + self._idle.seconds(0)
        drafting = _nearest(self._drafting, self.load)
        return verify_s + (drafting.seconds(drafts) if drafting else 0.0)


def _nearest(curves: dict[int, CostCurve], load: int) -> CostCurve | None:
    return curves[min(curves, key=lambda known: abs(known - load))] if curves else None


def _curve(curves: dict[int, CostCurve], load: int, size: int, *, proportional: bool) -> CostCurve:
    """Return the curve of a load; a new one begins as that of the nearest."""
    if load not in curves:
        nearest = _nearest(curves, load)
        curves[load] = nearest.copied() if nearest else CostCurve(size, proportional=proportional)
    return curves[load]
