"""How many drafts the next round asks for."""

from __future__ import annotations

from typing import Protocol

from services.coordinator.types import Round


class GammaPolicy(Protocol):
    """Chooses gamma round by round. Never looks at a draft that was not tested."""

    def choose(self, room: int) -> int:
        """Return gamma for the next round, at most `room`."""

    def observe(self, done: Round) -> None:
        """Learn from a round that is over."""


class FixedGamma:
    """Always the same."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, room: int) -> int:
        """Return gamma, or what there is room for."""
        return min(self._gamma, room)

    def observe(self, done: Round) -> None:
        """Learn nothing."""
