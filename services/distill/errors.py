"""What can go wrong when a draft is made, in words for the person who makes it."""

from __future__ import annotations

from services.common.specdec.errors import StartupError


class DistillError(StartupError):
    """A draft that cannot be made, or not in this folder; the message says what to change."""
