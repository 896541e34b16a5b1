"""Paired ratios, and how sure one can be of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bootstrap interval."""

    value: float
    low: float
    high: float


def paired_ratio(numerator: npt.NDArray[np.float64], denominator: npt.NDArray[np.float64]) -> Interval:
    """Return numerator / denominator, pair by pair, with a 95% bootstrap interval.

    The median over the repeats of a prompt, so that a slow moment of the machine does not count, then the geometric
    mean over prompts. Prompts differ more than repeats of one do, so prompts are drawn with replacement, and for each
    one its repeats.

    Args:
        numerator: float64[prompts, repeats].
        denominator: float64[prompts, repeats].
    """
    logs = np.log(numerator / denominator)
    prompts, repeats = logs.shape
    random = np.random.default_rng(0)
    rows = random.integers(prompts, size=(_RESAMPLES, prompts, 1))
    columns = random.integers(repeats, size=(_RESAMPLES, prompts, repeats))
    means = np.median(logs[rows, columns], axis=2).mean(axis=1)
    low, high = np.quantile(means, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return Interval(float(np.exp(np.median(logs, axis=1).mean())), float(np.exp(low)), float(np.exp(high)))
