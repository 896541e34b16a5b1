"""A pass that requests share is a trace of its own, linked with theirs, if they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from services.common.engine.engine import Engine
from services.common.engine.options import EngineOptions
from services.common.rpc import passes
from services.common.rpc.call import CallInfo, serving
from services.common.rpc.passes import MOST_LINKS, trace_pass
from tests.support.engines import evaluate, held, load
from tests.support.models import make_tiny_llama
from tests.tracing.conftest import Traced
from tests.tracing.recording import Recording

SAMPLED, UNSAMPLED = "01", "00"


@dataclass(frozen=True)
class Passing:
    """An engine whose passes are traced, and the spans."""

    engine: Engine
    recording: Recording

    async def share(self, *flags: str) -> list[CallInfo]:
        """Have a call for each of the flags, all in one pass; return the calls."""
        # What holds the pass before theirs belongs to no call.
        hold, task = await held(await self.engine.open(8))
        calls = [CallInfo(traceparent=f"00-{n + 1:032x}-{n + 1:016x}-{each}") for n, each in enumerate(flags)]
        asked = []
        for call in calls:
            session = await self.engine.open(8)
            with serving(call):
                asked.append(asyncio.create_task(evaluate(session, 0, [5, 6, 7])))
        while self.engine.queue < len(calls) + 1:
            await asyncio.sleep(0)
        hold.release()
        await asyncio.gather(task, *asked)
        return calls

    @property
    def span(self) -> ReadableSpan:
        """The one that there is."""
        (span,) = self.recording.spans
        return span


@pytest.fixture
async def passing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Passing]:
    # By itself it would sample nothing.
    recording = Recording(0.0)
    monkeypatch.setattr(passes, "_tracer", recording.provider.get_tracer("test"))
    loaded = load(make_tiny_llama(tmp_path / "model"))
    options = EngineOptions(kv_cache_memory="64MiB")
    engine = await asyncio.to_thread(Engine, loaded, options, on_pass=trace_pass)
    yield Passing(engine, recording)
    await engine.close()


async def test_a_shared_pass_links_to_its_sampled_requests(passing: Passing) -> None:
    first, unsampled, third = await passing.share(SAMPLED, UNSAMPLED, SAMPLED)
    span = passing.span
    assert span.parent is None
    assert span.attributes == {"paceline.pass.sessions": 3, "paceline.pass.sampled": 2, "paceline.pass.tokens": 9}
    assert [link.context.trace_id for link in span.links] == [1, 3]
    assert span.context is not None
    assert span.context.trace_id not in (1, 2, 3)
    assert first.passes == third.passes == [span.context]
    assert unsampled.passes == []
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time < span.end_time


async def test_a_pass_of_unsampled_requests_begins_no_span(passing: Passing) -> None:
    await passing.share(UNSAMPLED, UNSAMPLED)
    assert passing.recording.begun == 0


async def test_a_pass_that_nobody_shares_is_in_its_requests_own_trace(passing: Passing) -> None:
    (call,) = await passing.share(SAMPLED)
    assert passing.recording.begun == 0
    assert call.passes == []


async def test_a_pass_has_a_limit_of_links(passing: Passing) -> None:
    calls = await passing.share(*[SAMPLED] * (MOST_LINKS + 3))
    span = passing.span
    assert len(span.links) == MOST_LINKS
    assert span.attributes is not None
    assert span.attributes["paceline.pass.sampled"] == MOST_LINKS + 3
    assert all(call.passes == [span.context] for call in calls)


def test_forward_spans_and_the_passes_that_they_share_link_to_each_other(traced: Traced) -> None:
    fields = {"text": "abcabc", "gamma": 0, "max_tokens": 200, "stop": {"ignore_eos": True}}
    with ThreadPoolExecutor(2) as threads:
        replies = [threads.submit(traced.coordinator.generate, **fields) for _ in range(2)]
        traces = {reply.result().result.trace_id for reply in replies}
    shared = traced.receiver.span("paceline.pass", paceline__pass__sessions=2)
    assert shared.parent_id == ""
    assert {trace for trace, _ in shared.links} == traces
    # Round, verify, accept, queue and forward of each token, and the request.
    spans = [span for trace in traces for span in traced.receiver.trace(trace, 5 * 200 + 1)]
    asked = {(span.trace_id, span.span_id) for span in spans if span.name == "paceline.verify"}
    assert set(shared.links) <= asked
    linked = [span for span in spans if (shared.trace_id, shared.span_id) in span.links]
    assert {span.name for span in linked} == {"paceline.forward"}
    assert {(span.trace_id, span.parent_id) for span in linked} == set(shared.links)
