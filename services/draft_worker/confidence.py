"""When a draft stops early: how likely its tokens are to be kept, judged by what became of those before.

A draft that has sampled x1..xi goes on where

    P(x1..xi all kept) x P(the next one is kept) >= stop_below

so that a token that will hardly be reached costs neither a draft step nor a position of the target's pass. The first
factor is the product of what tokens of such a probability were kept with so far, the second is alpha.

Exact, by invariant 5: x1..xi are sent whatever comes out, and x(i+1) does not exist yet. Looking at q(i+1) first would
tell more, but costs the step that is to be saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    # Not for a worker that only looks up: torch takes 120 MB.
    import torch

# Borders of classes of the probability that the model gives to its draft.
_BORDERS: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
# Until more is known, a draft of the model's probability m is kept with .2 + .75 m: known as from so many drafts.
_PRIOR: Final = (0.22, 0.26, 0.31, 0.4, 0.52, 0.63, 0.74, 0.83, 0.9, 0.94)
_PRIOR_ALPHA: Final = 0.5
_PRIOR_WEIGHT: Final = 10.0
# Drafts that a rate remembers.
_MEMORY: Final = 2000.0


class Rate:
    """How often something came true, of late.

    Attributes:
        value: The share of times that it did.
    """

    def __init__(self, prior: float, weight: float = _PRIOR_WEIGHT, memory: float = _MEMORY) -> None:
        """Begin with a guess.

        Args:
            prior: The share.
            weight: Times that it is known as from.
            memory: Times that are remembered.
        """
        self.value = prior
        self._seen = weight
        self._memory = memory

    def observe(self, true: bool) -> None:
        """Learn that it came true, or did not."""
        self._seen = min(self._seen + 1, self._memory)
        self.value += (true - self.value) / self._seen


class Learner(Protocol):
    """What learns from the fates of drafts."""

    def observe(self, probability: float, kept: bool) -> None:
        """Learn what became of a draft that was tested."""


class Calibration:
    """How often drafts are kept: in all, and by the probability that the model gave them."""

    def __init__(self) -> None:
        self._all = Rate(_PRIOR_ALPHA)
        self._classes = [Rate(prior) for prior in _PRIOR]

    @property
    def alpha(self) -> float:
        """Drafts kept over drafts tested."""
        return self._all.value

    def keep(self, probability: float) -> float:
        """Return the share of drafts of about this probability that are kept."""
        return self._classes[bisect_right(_BORDERS, probability)].value

    def observe(self, probability: float, kept: bool) -> None:
        """Learn what became of a draft that was tested."""
        self._all.observe(kept)
        self._classes[bisect_right(_BORDERS, probability)].observe(kept)


class Guess(NamedTuple):
    """A draft whose fate is not known yet."""

    position: int
    token: int
    probability: float


class Fates:
    """A session's drafts, and what became of them as the next requests tell: the text that they begin with.

    A token of the text in a draft's place that is another one: that draft was rejected, and those after it were never
    tested. A token after the last draft: all were kept. Drafts that the text only repeats may still be in the target's
    pass, while drafting runs ahead of it; of those before the last request's the pass is over.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._waiting: list[Guess] = []
        self._earlier = 0

    def add(self, guess: Guess) -> None:
        """Note a draft."""
        self._waiting.append(guess)

    def tell(self, base_length: int, tokens: Sequence[int]) -> None:
        """Learn from a request that keeps `base_length` tokens of the text and appends `tokens`."""
        waiting, end = self._waiting, base_length + len(tokens)
        rejected = next((i for i, g in enumerate(waiting) if not _stands(g, base_length, tokens)), len(waiting))
        is_over = rejected < len(waiting) or bool(waiting and end > waiting[-1].position + 1)
        for guess in waiting[: rejected if is_over else self._earlier]:
            self._learner.observe(guess.probability, kept=True)
        # A text that ends before a draft's place says nothing of it.
        if rejected < len(waiting) and waiting[rejected].position < end:
            self._learner.observe(waiting[rejected].probability, kept=False)
        self._waiting = [] if is_over else waiting[self._earlier :]
        self._earlier = len(self._waiting)


def _stands(guess: Guess, base_length: int, tokens: Sequence[int]) -> bool:
    at = guess.position - base_length
    return at < 0 or (at < len(tokens) and tokens[at] == guess.token)


class EarlyStop:
    """Whether one proposal goes on, token by token."""

    def __init__(self, fates: Fates, calibration: Calibration, stop_below: float) -> None:
        self._fates = fates
        self._calibration = calibration
        self._stop_below = stop_below
        self._reached = 1.0

    @property
    def goes_on(self) -> bool:
        """Whether another token is worth its cost."""
        return self._reached * self._calibration.alpha >= self._stop_below

    def sampled(self, position: int, token: int, logits: torch.Tensor, index: int) -> None:
        """Note a token that was sampled, and is sent.

        Args:
            position: Its place in the text.
            token: Its id.
            logits: float[1, vocab], as the model gave them: a processed q may be certain of a token that the model is
                not, with temperature 0 of every one.
            index: Where in `logits` the token is.
        """
        if not self._stop_below:
            return
        scores = logits[0].float()
        probability = float((scores[index] - scores.logsumexp(0)).exp())
        self._reached *= self._calibration.keep(probability)
        self._fates.add(Guess(position, token, probability))
