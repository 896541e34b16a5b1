"""What the log's handler leaves of exceptions that are not this project's."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import pytest

from services.common.rpc.content import WithoutContent
from services.common.specdec.errors import CapacityError

SECRET = "what somebody asked"


def raised(make: Callable[[], None]) -> logging.LogRecord:
    try:
        make()
    except BaseException as error:
        info = (type(error), error, error.__traceback__)
        return logging.LogRecord("services.x", logging.ERROR, __file__, 1, "failed: %s", (error,), info)
    raise AssertionError("nothing was raised")


def line_of(record: logging.LogRecord) -> str:
    assert WithoutContent().filter(record)
    return logging.Formatter().format(record)


def foreign() -> None:
    raise ValueError(SECRET)


def own_from_foreign() -> None:
    try:
        foreign()
    except ValueError as error:
        raise CapacityError("no room for 3 sessions") from error


def group() -> None:
    raise ExceptionGroup(SECRET, [ValueError(SECRET), CapacityError("no room for 3 sessions")])


def note() -> None:
    error = KeyError(SECRET)
    error.add_note(SECRET)
    raise error


def system() -> None:
    os.stat("/nowhere/at/all")


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (
            foreign,
            ["failed: ValueError (its text is left out: --log-content)", "in foreign", "raise ValueError(SECRET)"],
        ),
        (own_from_foreign, ["CapacityError: no room for 3 sessions", "ValueError (its text", "which led to:"]),
        (group, ["ExceptionGroup (its text", "ValueError (its text", "CapacityError: no room for 3 sessions"]),
        (note, ["failed: KeyError (its text"]),
        (system, ["FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'"]),
    ],
)
def test_kinds_and_places_stay_and_texts_go(make: Callable[[], None], kept: list[str]) -> None:
    line = line_of(raised(make))
    assert SECRET not in line
    for words in kept:
        assert words in line


def test_an_exception_as_the_message() -> None:
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, ValueError(SECRET), None, None)  # type: ignore[arg-type]
    assert line_of(record) == "ValueError (its text is left out: --log-content)"


async def test_a_task_that_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    async def lost() -> None:
        raise ValueError(SECRET)

    without = WithoutContent()
    caplog.handler.addFilter(without)
    task = asyncio.create_task(lost())
    await asyncio.wait([task])
    del task
    caplog.handler.removeFilter(without)
    assert "Task exception was never retrieved" in caplog.text
    assert SECRET not in caplog.text
