"""Logs: one line each for people or for machines, with the request and the trace that it belongs to."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Literal, TypeAlias

from pythonjsonlogger.json import JsonFormatter

from services.common.rpc.call import CallInfo, current_call
from services.common.rpc.content import WithoutContent

LogFormat: TypeAlias = Literal["console", "json"]

log = logging.getLogger(__name__)

_CONSOLE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def configure_logging(
    level: str,
    log_format: LogFormat = "console",
    who: Mapping[str, str] | None = None,
    log_content: bool = False,
) -> None:
    """Log to standard error; standard output is for LISTENING and READY.

    Warnings of Python and errors that nobody catches are lines of the log too.

    Args:
        level: Least severe level to log.
        log_format: `console` for people; `json`, an object a line.
        who: Fields of every JSON line.
        log_content: Have exceptions of libraries say what they say, which may be a part of a prompt or an answer.
    """
    logging.basicConfig(handlers=[_handler(log_format, who or {}, log_content)], level=level.upper(), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def adopt_libraries() -> None:
    """Have libraries that bring handlers of their own (torch, transformers) log through ours; call it once imported."""
    for logger in [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]:
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout):
                logger.removeHandler(handler)
                logger.propagate = True


def _handler(log_format: LogFormat, who: Mapping[str, str], log_content: bool) -> logging.Handler:
    """Return the one handler of a process: whatever has to hold for every line is added here."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json(who) if log_format == "json" else _Console(_CONSOLE))
    handler.addFilter(_add_call)
    if not log_content:
        handler.addFilter(WithoutContent())
    return handler


def _json(who: Mapping[str, str]) -> logging.Formatter:
    return JsonFormatter(
        ["levelname", "name", "message"],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields=dict(who),
        # A default of the same name puts it first.
        defaults={"timestamp": None},
        timestamp=True,
        json_ensure_ascii=False,
    )


class _Console(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        told = [f"{label} {record.__dict__[name]}" for name, label in _SHOWN.items() if name in record.__dict__]
        return super().formatMessage(record) + (f" [{', '.join(told)}]" if told else "")


_SHOWN = {"request_id": "request", "trace_id": "trace"}


def _add_call(record: logging.LogRecord) -> bool:
    if call := current_call():
        record.__dict__.update(_fields(call))
    return True


def _fields(call: CallInfo) -> dict[str, str]:
    """Return what is known of a call, by the names that OpenTelemetry has for it in logs."""
    found = {} if call.request_id == "-" else {"request_id": call.request_id}
    if match := _TRACEPARENT.fullmatch(call.traceparent):
        found |= zip(("trace_id", "span_id", "trace_flags"), match.groups(), strict=True)
    return found


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        log.critical("%s: nobody caught it", kind.__name__, exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)
