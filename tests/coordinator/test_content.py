"""Nothing of a prompt or an answer in logs, spans and errors, however a request goes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.v1 import coordinator_pb2 as pb
from services.common.rpc.content import WithoutContent
from services.common.specdec.errors import InvalidFieldError
from services.coordinator import service
from services.coordinator.text import TextCodec
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import BadRow, DraftScript, TargetScript
from tests.support.tokenizers import letter_tokenizer

LAW = close_law(distance=0.5, seed=2)
MARK = "Xylophone"
CONTEXT = 64


class Told:
    """All that a process tells of itself: log lines at every level, and spans."""

    def __init__(self, caplog: pytest.LogCaptureFixture, spans: InMemorySpanExporter) -> None:
        self._caplog, self._spans = caplog, spans

    @property
    def text(self) -> str:
        spans = "\n".join(span.to_json() for span in self._spans.get_finished_spans())
        return f"{self._caplog.text}\n{spans}"

    @property
    def span_names(self) -> set[str]:
        return {span.name for span in self._spans.get_finished_spans()}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    for module in ("observe", "service"):
        monkeypatch.setattr(f"services.coordinator.{module}.tracer", provider.get_tracer("tests"))
    caplog.set_level(logging.DEBUG)
    without = WithoutContent()
    caplog.handler.addFilter(without)
    yield Told(caplog, spans)
    caplog.handler.removeFilter(without)


def chat(*contents: str) -> dict[str, Any]:
    messages = [pb.ChatMessage(role=pb.ROLE_USER, content=content) for content in contents]
    return {"tokens": None, "chat": pb.ChatPrompt(messages=messages)}


def text(prompt: str) -> dict[str, Any]:
    return {"tokens": None, "text": prompt}


async def ended(cluster: Cluster, fields: dict[str, Any]) -> tuple[str, str]:
    """Return the answer's text and, where it was refused, the error's."""
    try:
        return (await cluster.generate([], **{"max_tokens": 24, "gamma": 3, "seed": 1, **fields})).text, ""
    except grpc.aio.AioRpcError as error:
        return "", f"{error}{error.trailing_metadata()}"


WELL: dict[str, dict[str, Any]] = {
    "text": text(MARK),
    "chat": chat(MARK, "and more"),
    "stop": text("abc") | {"stop": pb.StopConditions(strings=[MARK], ignore_eos=True)},
}
BADLY: dict[str, dict[str, Any]] = {
    "too long": text(MARK * CONTEXT),
    "chat too long": chat(*[MARK] * CONTEXT),
    "no role": {"tokens": None, "chat": pb.ChatPrompt(messages=[pb.ChatMessage(content=MARK)])},
    "stop string too long": text("abc") | {"stop": pb.StopConditions(strings=[MARK * 100])},
    "gamma": text(MARK) | {"gamma": 1_000},
}


async def test_requests_that_go_well_and_that_are_refused(told: Told) -> None:
    async with scripted_cluster(LAW, context_length=CONTEXT) as cluster:
        for which, fields in (WELL | BADLY).items():
            answer, error = await ended(cluster, fields)
            assert bool(error) == (which in BADLY), which
            assert MARK not in error + told.text, which
            assert len(answer) >= 20 or which in BADLY
            assert not answer or answer not in told.text
    assert {"paceline.CoordinatorService", "paceline.round", "paceline.verify"} & told.span_names
    assert "INVALID_ARGUMENT" in told.text


@pytest.mark.parametrize(
    ("scripts", "words"),
    [
        ({"target": TargetScript(bad_p=BadRow.NAN)}, "the target's row p[0] has a non-finite entry"),
        ({"draft": DraftScript(bad_q=BadRow.NAN)}, "q[0] has a non-finite entry"),
        ({"draft": DraftScript(bad_q=BadRow.OUTSIDE_SUPPORT)}, "q[0] gives its own draft no probability"),
        ({"target": TargetScript(die_on=range(2, 4))}, "target lost: UNAVAILABLE: the script says die"),
        ({"draft": DraftScript(die_on=range(2, 4))}, "draft lost: UNAVAILABLE: the script says die"),
        (
            {"target": TargetScript(die_on=[2], die_as=grpc.StatusCode.INVALID_ARGUMENT)},
            "TargetRefusesError: the target refuses what the coordinator sends",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(*value),
)
async def test_workers_that_fail(told: Told, scripts: dict[str, Any], words: str) -> None:
    async with scripted_cluster(LAW, **scripts) as cluster:
        answer, error = await ended(cluster, text(MARK))
    assert words in told.text
    assert MARK not in error + told.text
    assert not answer or answer not in told.text


async def test_a_bug_whose_text_is_the_prompt(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(request: pb.GenerateRequest, *_: object) -> None:
        try:
            {}[request.text]
        except KeyError as error:
            raise ValueError(f"no such thing as {request.text}") from error

    async with scripted_cluster(LAW) as cluster:
        monkeypatch.setattr(service, "plan", stumble)
        _, error = await ended(cluster, text(MARK) | {"request_id": "stumbles"})
    assert "request id stumbles" in error
    assert MARK not in error + told.text
    # Kind and place are left, of what led to it too.
    assert "KeyError (its text is left out" in told.text
    assert "ValueError (its text is left out" in told.text
    assert "in stumble" in told.text


async def test_content_where_it_is_asked_for(told: Told) -> None:
    async with scripted_cluster(LAW, log_content=True) as cluster:
        answer, _ = await ended(cluster, text("abcd"))
    assert "prompt: [0, 1, 2, 3]" in told.text
    pieces = [line.partition("answer: ")[2].strip("'") for line in told.text.splitlines() if "answer: " in line]
    # Short ones come before it, to find out whether the draft is used.
    assert "".join(pieces).endswith(answer)


def test_a_template_that_quotes_a_message_is_not_quoted() -> None:
    template = "{{ raise_exception('bad: ' + messages[0].content) }}"
    codec = TextCodec(letter_tokenizer(8).to_str().encode(), template, {})
    with pytest.raises(InvalidFieldError) as refused:
        codec.encode_chat([("user", f" {MARK} ")], CONTEXT)
    assert MARK not in str(refused.value)
    assert "chat.messages is ['user']" in str(refused.value)
