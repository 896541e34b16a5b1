"""The words of the domain: sampling parameters, rows, drafts, and what became of a round."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_GAMMA: Final = 64
"""Most drafts in a round, whoever asks: a worker holds a row over the vocabulary for each of them at once."""

MAX_FEATURE_BYTES: Final = 8 * 2**20
"""Most bytes of the target's hidden states in a message; a draft looks back no further than they reach."""

FloatArray: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a distribution is made from logits: temperature, then top-k, then top-p, then min-p.

    Attributes:
        temperature: 0 is greedy, all mass on the likeliest token.
        top_k: Keep this many of the likeliest tokens; 0 keeps all.
        top_p: Keep the smallest set of likeliest tokens that holds this mass, in (0, 1]; 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the likeliest, in [0, 1]; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, eq=False)
class Row:
    """One distribution over the vocabulary, exactly as it was sampled from.

    Attributes:
        weights: float32[n] or float64[n], probabilities up to rounding.
        ids: uint32[n], ascending and unique, the tokens that the weights belong to; all others have probability 0. None
            for a dense row, whose weights are those of the tokens 0..n-1.
    """

    weights: FloatArray
    ids: npt.NDArray[np.uint32] | None = None

    @classmethod
    def point_mass(cls, token: int) -> Row:
        """Return the row that is certain of `token`."""
        return cls(np.ones(1, np.float32), np.array([token], np.uint32))

    @functools.cached_property
    def total(self) -> np.float64:
        """The sum of the weights, close to 1. Summed once, a round needs it often."""
        return np.float64(np.add.reduce(self.weights, dtype=np.float64))

    @functools.cached_property
    def support(self) -> npt.NDArray[np.uint32]:
        """The tokens of positive weight: uint32[n], ascending."""
        positive = self.weights > 0
        if self.ids is None:
            return np.flatnonzero(positive).astype(np.uint32)
        return self.ids if positive.all() else self.ids[positive]

    @property
    def nbytes(self) -> int:
        """Bytes that the row takes on the wire."""
        return self.weights.nbytes + (0 if self.ids is None else self.ids.nbytes)

    def weight(self, token: int) -> float:
        """Return the weight of one token: 0 outside the support."""
        if self.ids is None:
            return float(self.weights[token]) if token < len(self.weights) else 0.0
        # Of the ids' own type: numpy would convert them all for a Python int.
        at = int(self.ids.searchsorted(np.uint32(token)))
        return float(self.weights[at]) if at < len(self.ids) and int(self.ids[at]) == token else 0.0

    def dense(self, vocab_size: int) -> npt.NDArray[np.float64]:
        """Return the weights of all tokens: float64[vocab_size]."""
        if self.ids is None:
            return self.weights.astype(np.float64)
        full = np.zeros(vocab_size, np.float64)
        full[self.ids] = self.weights
        return full


class VerificationMode(enum.Enum):
    """How drafts are verified; the law of the text is p either way.

    TOKEN is the plain rule. COUPLED: draft and target choose by the same noise, keyed (seed, position, token id), and a
    draft is kept where they agree (Daliri et al. 2024, arXiv 2408.07978).
    """

    TOKEN = "token"  # noqa: S105 - no password
    COUPLED = "coupled"


class BadRowError(ValueError):
    """A row that is no distribution over the vocabulary; the message says what is wrong with it."""


def check_row(row: Row, vocab_size: int, tolerance: float = 1e-3) -> None:
    """Check that a row is a distribution over the vocabulary.

    Args:
        row: What a worker sent.
        vocab_size: Entries of a dense row; the bound of a sparse row's ids.
        tolerance: How far from 1 the sum may be. Rows are float32 and the rule divides by the sum in float64, so this
            only has to tell rounding from nonsense.

    Raises:
        BadRowError: A wrong size, ids out of order or out of range, or weights that are negative, not finite or do not
            sum to 1.
    """
    if row.ids is None:
        if len(row.weights) != vocab_size:
            raise BadRowError(f"has {len(row.weights)} entries, the vocabulary {vocab_size}")
    else:
        if len(row.ids) != len(row.weights):
            raise BadRowError(f"has {len(row.ids)} ids and {len(row.weights)} probabilities")
        if len(row.ids) and (int(row.ids[-1]) >= vocab_size or bool((row.ids[1:] <= row.ids[:-1]).any())):
            raise BadRowError(f"has ids that are not ascending below the vocabulary size {vocab_size}")
    # The least entry first, which is a NaN where there is one: the sum is then of numbers that are not negative.
    low = float(row.weights[row.weights.argmin()]) if len(row.weights) else 0.0
    if low >= 0 and abs(row.total - 1) <= tolerance:
        return
    bad = np.flatnonzero(~np.isfinite(row.weights))
    if bad.size:
        raise BadRowError(f"has a non-finite entry at index {int(bad[0])}")
    if low < 0:
        raise BadRowError(f"has a negative entry at index {int(row.weights.argmin())}")
    raise BadRowError(f"sums to {row.total:.6g}, not to 1")


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed token and the distribution that it was sampled from."""

    token: int
    q: Row


class Origin(enum.Enum):
    """Where a committed token came from."""

    ACCEPTED_DRAFT = "accepted draft"
    RESIDUAL = "residual"
    BONUS = "bonus"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rule made of a round.

    Attributes:
        tokens: The committed tokens: the accepted drafts, then one from p where a row of p is left for it.
        accepted: How many drafts were kept.
        tested: How many drafts were looked at: `accepted`, and the rejected one if there was one.
        origin: Where the last token came from.
    """

    tokens: tuple[int, ...]
    accepted: int
    tested: int
    origin: Origin

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each token."""
        return (Origin.ACCEPTED_DRAFT,) * self.accepted + (self.origin,) * (len(self.tokens) - self.accepted)
