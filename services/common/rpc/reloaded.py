"""What files say, read anew when they change: certificates and tokens are replaced under a running process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.common.specdec.errors import StartupError

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Files are looked at no more often than this; three of them take some 50 microseconds."""


class UnusableFilesError(Exception):
    """Files that cannot be used; the message names them, says what is wrong, and has nothing of what is in them."""


class Reloaded(Generic[T]):
    """A value made of the contents of files. There is no watcher: whoever wants the value looks, once a second.

    Contents are compared, not times: a volume of Kubernetes swaps a link, and keeps the times of what is behind it.
    Files that cannot be used, half-written or of two generations, leave the value as it was, and are told of once. Safe
    to use from several threads: gRPC asks for a server's certificate from its own.
    """

    def __init__(
        self, paths: Sequence[str], make: Callable[[Sequence[bytes]], T], look_every_s: float = LOOK_EVERY_S
    ) -> None:
        """Read the files.

        Args:
            paths: The files.
            make: Makes the value of their contents, in that order. Raises `UnusableFilesError` where it cannot.
            look_every_s: How old the value may be.

        Raises:
            StartupError: A file cannot be read, or they cannot be used.
        """
        self._paths, self._make, self._look_every_s = [Path(path) for path in paths], make, look_every_s
        self._lock = threading.Lock()
        try:
            self._contents = self._read()
            self._value = make(self._contents)
        except UnusableFilesError as error:
            raise StartupError(str(error)) from None
        self._looked_s = time.monotonic()
        self._refused: Sequence[bytes] | str = ""

    def current(self) -> T:
        """Return the value, anew where the files have changed. The same object as long as they have not."""
        with self._lock:
            if time.monotonic() - self._looked_s >= self._look_every_s:
                self._look()
                self._looked_s = time.monotonic()
            return self._value

    def _look(self) -> None:
        try:
            contents = self._read()
        except UnusableFilesError as error:
            self._refuse(str(error), error)
            return
        if contents == self._contents:
            self._refused = ""
        elif contents != self._refused:
            try:
                self._value = self._make(contents)
            except UnusableFilesError as error:
                self._refuse(contents, error)
                return
            self._contents, self._refused = contents, ""
            log.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _refuse(self, what: Sequence[bytes] | str, error: UnusableFilesError) -> None:
        if what != self._refused:
            self._refused = what
            log.error("%s; what was there before stays in use", error)

    def _read(self) -> list[bytes]:
        try:
            return [path.read_bytes() for path in self._paths]
        except OSError as error:
            raise UnusableFilesError(f"{error.filename} cannot be read: {error.strerror}") from None
