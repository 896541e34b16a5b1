"""Takes in a child's standard error: to a log file as it is, and line by line to whoever shows progress."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import pty
import re
import sys
import termios
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

_TAIL_LINES = 20
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")

OnLine = Callable[[str], None]


class Relay:
    """The reading end of a child's standard error.

    Where this process's own standard error is a terminal the child gets a terminal too, so that the tools it runs (pip)
    draw the progress bars that they would draw for a person.
    """

    def __init__(self, log: BinaryIO, on_line: OnLine) -> None:
        """Open both ends and start to read.

        Args:
            log: Gets every byte.
            on_line: Called with each line (blank ones left out) and each state of a progress bar, as plain text.
        """
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.ended = asyncio.Event()
        self._log, self._on_line = log, on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._ours, self.theirs = _open_terminal() if sys.stderr.isatty() else os.pipe()
        asyncio.get_running_loop().add_reader(self._ours, self._on_readable)

    def close(self) -> None:
        """Stop reading."""
        if not self.ended.is_set():
            asyncio.get_running_loop().remove_reader(self._ours)
            os.close(self._ours)
            self._log.close()
            self.ended.set()

    def _on_readable(self) -> None:
        try:
            data = os.read(self._ours, 2**16)
        except OSError:
            # What a terminal says in place of end of file.
            data = b""
        # A full disk must not hide what the child says about it.
        with contextlib.suppress(OSError):
            self._log.write(data)
        self._feed(self._decoder.decode(data, final=not data))
        if not data:
            self._feed("\n")
            self.close()

    def _feed(self, text: str) -> None:
        *segments, self._pending = re.split("(?<=[\r\n])", self._pending + text)
        for segment in segments:
            line = _ESCAPES.sub("", segment).rstrip()
            if not line:
                continue
            if segment.endswith("\n"):
                self.tail.append(line)
            self._on_line(line.lstrip())


def _open_terminal() -> tuple[int, int]:
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    # No output processing: a line feed stays one byte.
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    with contextlib.suppress(OSError):
        termios.tcsetwinsize(theirs, termios.tcgetwinsize(sys.stderr))
    return ours, theirs
