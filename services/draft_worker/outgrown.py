"""Sessions whose text has outgrown what they could reserve of the KV pool: told of once, counted always."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Outgrown:
    """A drafter's, over all of its sessions.

    Attributes:
        sessions: How many have ended their drafting before their text ended.
    """

    def __init__(self) -> None:
        self.sessions = 0

    def note(self, length: int, room: int) -> None:
        """Note that a session drafts no more.

        Args:
            length: Tokens of its text now.
            room: Tokens that it has reserved.
        """
        if not self.sessions:
            _log.warning(
                "a session has filled its %d tokens of the KV pool, its text has %d: nothing more is drafted for it, "
                "as would be with a larger --kv-cache-memory. Further ones are counted only",
                *(room, length),
            )
        self.sessions += 1
