"""What the target wrote, and its states at every position, kept in files so that they are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts with the target's states.

    Attributes:
        tokens: int64[texts, positions].
        lengths: int64[texts]; what follows is padding.
        features: bfloat16[texts, positions, features], the states after each token.
        log_totals: float32[texts, positions], logarithms of the softmax's denominators.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    features: torch.Tensor
    log_totals: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return it on another device."""
        return Batch(*(tensor.to(device) for tensor in (self.tokens, self.lengths, self.features, self.log_totals)))


class TeacherData:
    """The files of a folder: tokens.npy, lengths.npy, states.bin, logz.bin, done.txt."""

    def __init__(self, folder: Path, feature_width: int) -> None:
        """Open the files, whose states have `feature_width` numbers a position."""
        self._folder = folder
        self._tokens: npt.NDArray[np.int32] = np.load(folder / "tokens.npy")
        self._lengths: npt.NDArray[np.int64] = np.load(folder / "lengths.npy")
        shape = self._tokens.shape
        self._features = np.memmap(folder / "states.bin", np.int16, mode="r", shape=(*shape, feature_width))
        self._log_totals = np.memmap(folder / "logz.bin", np.float32, mode="r", shape=shape)

    @property
    def ready(self) -> int:
        """Texts whose states have been computed, from the first on."""
        return min(len(self._tokens), int((self._folder / "done.txt").read_text()))

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Return these texts, as wide as the longest of them."""
        width = int(self._lengths[rows].max())
        return Batch(
            torch.from_numpy(self._tokens[rows, :width].astype(np.int64)),
            torch.from_numpy(self._lengths[rows]),
            torch.from_numpy(np.ascontiguousarray(self._features[rows, :width])).view(torch.bfloat16),
            torch.from_numpy(np.ascontiguousarray(self._log_totals[rows, :width])),
        )

    def shuffled(self, first: int, size: int, seed: int, start: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the rows of batch after batch, for ever: the texts from `first` on, in a new order each time through.

        Args:
            first: Texts before this one are held out.
            size: Texts in a batch.
            seed: Of the orders.
            start: Batches to skip.

        Raises:
            ValueError: There are not the texts for a single batch.
        """
        epoch, skipped = 0, start
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(np.arange(first, self.ready))
            batches = len(order) // size
            if not batches:
                raise ValueError(f"{len(order)} texts are less than a batch of {size}")
            for at in range(min(skipped, batches), batches):
                yield order[at * size : (at + 1) * size]
            skipped = max(0, skipped - batches)
            epoch += 1
