"""Nothing of a prompt or an answer in logs, by accident.

This project's own messages have none: they name fields, counts and positions. What an exception of a library says is
not in its hands, and may be the very value that it stumbled over, so that text is left out of every line, unless
`--log-content`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any

import grpc

_LEFT_OUT = "(its text is left out: --log-content)"
# What a device says of itself, and what an operator has to read.
_OF_DEVICES = {"OutOfMemoryError", "AcceleratorError"}


class WithoutContent(logging.Filter):
    """Has a handler tell of exceptions by kind and place, and by their text only where that can have no content."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a record so that it has no content."""
        record.msg = _harmless(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_harmless, record.args))
        if record.name == "asyncio" and isinstance(record.msg, str):
            # It goes on with what the task was doing, and has ended with.
            record.msg = record.msg.partition("\n")[0]
        if record.exc_info:
            error = record.exc_info[1]
            record.exc_text = "".join(_lines(error, set())).rstrip("\n") if error is not None else None
            record.exc_info = None
        return True


def shown(error: BaseException) -> str:
    """Return an exception's kind, with its text where that is this project's, the operating system's or a device's."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    text = str(error)
    if not text:
        return name
    return f"{name}: {text}" if _may_speak(error) else f"{name} {_LEFT_OUT}"


def _may_speak(error: BaseException) -> bool:
    kind = type(error)
    own = kind.__module__.startswith("services.") or isinstance(error, OSError | grpc.aio.AioRpcError)
    return own or kind.__name__ in _OF_DEVICES


def _harmless(said: Any) -> Any:
    return shown(said) if isinstance(said, BaseException) and not _may_speak(said) else said


def _lines(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield what `traceback.format_exception` would, but for the texts."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _lines(before, seen)
        yield f"\n{'which led to' if error.__cause__ else 'during which there was'}:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_tb(error.__traceback__)
    yield f"{shown(error)}\n"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield "\none of which is:\n\n"
            yield from _lines(one, seen)
