"""Lines of the log: what each says of itself, and of the call that it belongs to."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc.call import CallInfo, serving
from services.common.rpc.codec import encode_sampling
from services.common.rpc.logs import adopt_libraries, configure_logging
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.specdec.types import SamplingParams
from services.draft_worker.ngram import NgramProposer
from services.draft_worker.service import SERVICE, DraftService, Serving

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
WHO = {"service": "paceline-test", "instance": "test-0"}
CALL = {"request_id", "trace_id", "span_id", "trace_flags"}
log = logging.getLogger("tests.some.module")

Errors = Callable[[], list[str]]


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]) -> Iterator[Errors]:
    """What has come on standard error; how this process logs is as it was at the end."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    handlers, level = root.handlers[:], root.level
    # So that they are not closed.
    root.handlers.clear()
    try:
        yield lambda: capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks


def lines_of(errors: Errors) -> list[dict[str, Any]]:
    return [json.loads(line) for line in errors()]


def test_a_line_of_json_says_when_how_bad_where_and_who(errors: Errors) -> None:
    configure_logging("info", "json", WHO)
    log.debug("not told")
    log.info("loaded %d of\n%s", 3, "Größe ☃")
    (line,) = lines_of(errors)
    assert list(line) == ["timestamp", "level", "logger", "message", "service", "instance"]
    assert line["message"] == "loaded 3 of\nGröße ☃"
    assert (line["level"], line["logger"]) == ("INFO", "tests.some.module")
    assert {name: line[name] for name in WHO} == WHO
    told = datetime.fromisoformat(line["timestamp"])
    assert told.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - told) < timedelta(minutes=1)


def test_an_exception_is_one_line(errors: Errors) -> None:
    configure_logging("info", "json", log_content=True)
    try:
        raise ZeroDivisionError("a secret")
    except ZeroDivisionError:
        log.exception("failed")
    (line,) = lines_of(errors)
    assert line["message"] == "failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: a secret")


async def test_lines_are_told_of_their_own_call(errors: Errors) -> None:
    """From its tasks and threads too, while another call runs, and with what became known later."""
    configure_logging("info", "json")
    both = asyncio.Barrier(2)

    async def serve(name: str, traceparent: str) -> None:
        with serving(call := CallInfo()):
            known = asyncio.Event()
            task = asyncio.create_task(work(name, known))
            log.info("%s unknown", name)
            await both.wait()
            call.request_id, call.traceparent = name, traceparent
            known.set()
            await both.wait()
            await task
            await asyncio.to_thread(log.info, "%s from a thread", name)
        log.info("%s over", name)

    async def work(name: str, known: asyncio.Event) -> None:
        await known.wait()
        log.info("%s from a task", name)

    await asyncio.gather(serve("first", TRACEPARENT), serve("second", ""))
    told = {line["message"]: {key: line[key] for key in CALL & line.keys()} for line in lines_of(errors)}
    traced = {"request_id": "first", "trace_id": TRACE, "span_id": SPAN, "trace_flags": "01"}
    assert told == {
        "first unknown": {},
        "second unknown": {},
        "first from a task": traced,
        "second from a task": {"request_id": "second"},
        "first from a thread": traced,
        "second from a thread": {"request_id": "second"},
        "first over": {},
        "second over": {},
    }


async def test_a_bug_in_a_worker_is_told_by_request_and_trace(errors: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(NgramProposer, "open", fail)
    configure_logging("info", "json")
    server = Server(ServerSettings(), [SERVICE])
    service = DraftService(server, idle_timeout_s=60, max_streams=1)
    service.attach(Serving(NgramProposer(2, 4, 8), worker_pb2.ModelInfo()))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)
    start = worker_pb2.SessionStart(request_id="r-7", sampling=encode_sampling(SamplingParams()))
    async with grpc.aio.insecure_channel(await server.listen()) as channel:
        asked = draft_pb2.ProposeRequest(start=start, traceparent=TRACEPARENT)
        with pytest.raises(grpc.aio.AioRpcError, match="internal error; the log has it under request id r-7"):
            [_ async for _ in draft_pb2_grpc.DraftServiceStub(channel).Propose(iter([asked]))]
    await server.close()
    (line,) = (line for line in lines_of(errors) if line["level"] == "ERROR")
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("r-7", TRACE, SPAN)
    assert "a secret" in line["exception"]


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE}\n-{SPAN}-01"]
)
def test_a_trace_context_that_is_none_is_left_out(errors: Errors, wrong: str) -> None:
    configure_logging("info", "json")
    with serving(CallInfo("r-7", wrong)):
        log.info("here")
    (line,) = lines_of(errors)
    assert CALL & line.keys() == {"request_id"}


def test_a_line_for_people_has_the_call_behind_its_message(errors: Errors) -> None:
    configure_logging("info", "console")
    with serving(CallInfo("r-7", TRACEPARENT)):
        log.warning("the target is lost")
    log.warning("all is well")
    first, second = errors()
    assert first.endswith(f" W tests.some.module: the target is lost [request r-7, trace {TRACE}]")
    assert second.endswith(" W tests.some.module: all is well")


def test_what_nobody_catches_and_warnings_are_lines_too(errors: Errors) -> None:
    configure_logging("info", "json", log_content=True)
    error = ZeroDivisionError("of a thread")

    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    sys.excepthook(ZeroDivisionError, ZeroDivisionError("of the main thread"), None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    of_thread, of_main, warning = lines_of(errors)
    assert of_thread["level"] == of_main["level"] == "CRITICAL"
    assert "of a thread" in of_thread["exception"]
    assert "of the main thread" in of_main["exception"]
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING")
    assert "DeprecationWarning: old" in warning["message"]


def test_a_library_with_a_handler_of_its_own_logs_through_ours(errors: Errors) -> None:
    library = logging.getLogger("tests.library")
    library.addHandler(logging.StreamHandler(sys.stderr))
    elsewhere = logging.StreamHandler(io.StringIO())
    library.addHandler(elsewhere)
    library.propagate = False
    configure_logging("info", "json")
    adopt_libraries()
    logging.getLogger("tests.library.part").warning("heard")
    (line,) = lines_of(errors)
    assert (line["logger"], line["message"]) == ("tests.library.part", "heard")
    # What goes to a file, say, still does.
    assert library.handlers == [elsewhere]
