"""Who decides what is sampled, and that what is not costs next to nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.trace import Link

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc import worker
from services.common.rpc.codec import encode_sampling
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.rpc.telemetry import extract, inject, span_context, traceparent
from services.common.specdec.types import SamplingParams
from services.coordinator import observe, service
from services.draft_worker.ngram import NgramProposer
from services.draft_worker.service import SERVICE, DraftService, Serving
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.processes import Processes
from tests.tracing.conftest import Traced
from tests.tracing.recording import Recording
from tests.tracing.test_tree import CLIENTS_SPAN, CLIENTS_TRACE

LAW = close_law(distance=0.5, seed=2)
SAMPLED, UNSAMPLED = (f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-{flags}" for flags in ("01", "00"))
REQUEST = pb.GenerateRequest(
    tokens=pb.TokenPrompt(ids=[0, 1]), gamma=2, max_tokens=30, stop=pb.StopConditions(ignore_eos=True)
)


def recording(monkeypatch: pytest.MonkeyPatch, ratio: float) -> Recording:
    made = Recording(ratio)
    for module, name in ((observe, "tracer"), (service, "tracer"), (worker, "_tracer")):
        monkeypatch.setattr(module, name, made.provider.get_tracer("test"))
    return made


async def result_of(cluster: Cluster, header: str = "") -> pb.GenerateResult:
    metadata = (("traceparent", header),) if header else ()
    return [item async for item in cluster.stub.Generate(REQUEST, timeout=60, metadata=metadata)][-1].result


@pytest.mark.parametrize(
    ("ratio", "header", "client_traces", "trace"),
    [
        (1.0, "", True, "its own"),
        (0.0, "", True, "none"),
        (0.0, SAMPLED, True, "the client's"),
        (1.0, UNSAMPLED, True, "none"),
        # Whoever may call may not have it traced.
        (0.0, SAMPLED, False, "none"),
        (1.0, UNSAMPLED, False, "its own"),
    ],
)
async def test_the_client_decides_where_it_may_and_else_the_ratio(
    monkeypatch: pytest.MonkeyPatch, ratio: float, header: str, client_traces: bool, trace: str
) -> None:
    async with scripted_cluster(LAW, client_traces=client_traces) as cluster:
        made = recording(monkeypatch, ratio)
        result = await result_of(cluster, header)
        rounds = result.speculation.rounds
    names = Counter(span.name for span in made.spans)
    if trace == "none":
        assert result.trace_id == ""
        assert made.spans == ()
        assert made.begun == 1, "one for the request, and none for its rounds"
        return
    assert names["paceline.round"] == rounds > 3
    (root,) = (span for span in made.spans if span.kind.name == "SERVER")
    assert root.context is not None
    assert result.trace_id == f"{root.context.trace_id:032x}"
    assert (result.trace_id == CLIENTS_TRACE) == (trace == "the client's")
    assert [f"{link.context.trace_id:032x}" for link in root.links] == ([CLIENTS_TRACE] if not client_traces else [])


@pytest.mark.parametrize(("header", "begun"), [(SAMPLED, 2), (UNSAMPLED, 0), ("", 0)])
async def test_a_worker_begins_no_span_for_what_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch, header: str, begun: int
) -> None:
    made = recording(monkeypatch, 0.0)
    server = Server(ServerSettings(), [SERVICE])
    drafts = DraftService(server, idle_timeout_s=60, max_streams=1)
    drafts.attach(Serving(NgramProposer(2, 4, 8), worker_pb2.ModelInfo()))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(drafts, server.grpc)
    start = worker_pb2.SessionStart(sampling=encode_sampling(SamplingParams()), prompt_length=2, max_new_tokens=8)
    asked = draft_pb2.ProposeRequest(start=start, tokens=[0, 1], gamma=1, traceparent=header)
    async with grpc.aio.insecure_channel(await server.listen()) as channel:
        assert [reply.done async for reply in draft_pb2_grpc.DraftServiceStub(channel).Propose(iter([asked]))][-1]
    await server.close()
    assert made.begun == begun
    assert len(made.spans) == (2 if header == SAMPLED else 0)


def test_a_messages_trace_fields_are_the_spans_context() -> None:
    provider = Recording(1.0).provider
    clients = draft_pb2.ProposeRequest(traceparent=SAMPLED, tracestate="vendor=1,other=2")
    with provider.get_tracer("test").start_as_current_span("span", extract(clients)) as span:
        message = draft_pb2.ProposeRequest()
        inject(span, message)
    assert message.traceparent == traceparent(span)
    assert message.traceparent.split("-")[1] == CLIENTS_TRACE
    assert message.tracestate == "vendor=1,other=2"
    found = provider.get_tracer("test").start_span("child", extract(message))
    assert found.parent is not None  # type: ignore[attr-defined]
    assert found.parent.span_id == span.get_span_context().span_id  # type: ignore[attr-defined]


def test_a_span_of_several_requests_is_sampled_as_they_are() -> None:
    tracer = Recording(0.0).provider.get_tracer("test")

    def is_sampled(*headers: str, parent: str = "") -> bool:
        context = extract(draft_pb2.ProposeRequest(traceparent=parent)) if parent else Context()
        links = [Link(span_context(header)) for header in headers]
        return tracer.start_span("pass", context, links=links).is_recording()

    assert not is_sampled()
    assert is_sampled(SAMPLED)
    assert not is_sampled(UNSAMPLED)
    assert not is_sampled(SAMPLED, parent=UNSAMPLED)


def test_the_standard_variables_say_how_many_are_sampled(traced: Traced, tmp_path: Path) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": traced.receiver.endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0",
    }
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(traced.target, traced.draft, env=variables)
        fields = {"text": "abc", "gamma": 1, "max_tokens": 3, "stop": {"ignore_eos": True}}
        assert coordinator.generate(**fields).result.trace_id == ""
        forced = f"00-{CLIENTS_TRACE[2:]}ff-{CLIENTS_SPAN}-01"
        reply = coordinator.generate(**fields, metadata={"traceparent": forced})
    assert reply.result.trace_id == forced.split("-")[1]
    # The workers follow, whatever they would sample by themselves.
    assert len(traced.receiver.trace(reply.result.trace_id, 1)) > 0
