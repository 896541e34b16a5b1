"""How much of a row of p is asked for: the likeliest entries beside the support of its q, and the rest on demand."""

from __future__ import annotations

import math
from typing import Final

LEAST_HEAD: Final = 32
MOST_HEAD: Final = 1_024
# Rounds of which a row had to be fetched whole: the share that the size settles at, and how far one of them moves it.
_TARGET_SHARE: Final = 0.015
_STEP_OCTAVES: Final = 0.5


class RowHeads:
    """The size of a head, for all requests of the service.

    A draw that falls beyond the known entries makes it 1.41 times as large, each round a little smaller: by so much
    that the two balance where 1.5% of rounds fetch a row. So it follows what the draws do, with nothing to be
    estimated: flat laws get long heads, sharp ones short.
    """

    def __init__(self, fixed: int | None = None) -> None:
        """Begin.

        Args:
            fixed: Always this size; None lets it follow the draws, between `LEAST_HEAD` and `MOST_HEAD`.
        """
        self._fixed = fixed
        self._octaves = 8.0

    @property
    def size(self) -> int:
        """Entries to ask for."""
        return round(2**self._octaves) if self._fixed is None else self._fixed

    def count_round(self) -> None:
        """Note a round whose rows have come in part."""
        self._move(-_TARGET_SHARE * _STEP_OCTAVES)

    def count_fetch(self) -> None:
        """Note that a draw fell beyond them."""
        self._move(_STEP_OCTAVES)

    def _move(self, octaves: float) -> None:
        self._octaves = min(max(self._octaves + octaves, math.log2(LEAST_HEAD)), math.log2(MOST_HEAD))
