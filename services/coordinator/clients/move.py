"""Opening a session somewhere else while the rounds go on: nothing waits for it, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic

from services.common.rpc.stream import Reply, Request, StreamLostError
from services.coordinator.clients.session import Backoff, Line

log = logging.getLogger(__name__)


class Move(Generic[Request, Reply]):
    """At most one line that is being opened, tried again after a back-off."""

    def __init__(self) -> None:
        self._opening: asyncio.Task[Line[Request, Reply]] | None = None
        self._backoff = Backoff()
        self._not_before_s = 0.0

    def begin(self, open_line: Callable[[], Coroutine[Any, Any, Line[Request, Reply]]]) -> None:
        """Begin to open a line, unless one is on its way or the last attempt failed a moment ago."""
        if self._opening is None and time.monotonic() >= self._not_before_s:
            self._opening = asyncio.create_task(open_line())

    def taken(self) -> Line[Request, Reply] | None:
        """Return the line that has been opened, if one has, and let go of it."""
        if self._opening is None or not self._opening.done():
            return None
        opening, self._opening = self._opening, None
        try:
            return opening.result()
        except (StreamLostError, TimeoutError) as error:
            log.debug("no other worker yet: %s", error)
            self.hold_off()
            return None

    def hold_off(self) -> None:
        """Begin no sooner than after a back-off."""
        self._not_before_s = time.monotonic() + self._backoff.step()

    def succeeded(self) -> None:
        """Start the back-off over: a line has done its work."""
        self._backoff.reset()

    async def close(self) -> None:
        """Give up what is being opened."""
        opening, self._opening = self._opening, None
        if opening is None:
            return
        if opening.cancel():
            # It closes its line itself.
            await asyncio.gather(opening, return_exceptions=True)
        elif opening.exception() is None:
            await opening.result().close()
