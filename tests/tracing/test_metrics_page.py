"""The page that Prometheus reads: the same metrics, by the names that queries and autoscaling go by."""

from __future__ import annotations

import queue
import urllib.request
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import draft_pb2, draft_pb2_grpc, worker_pb2
from services.common.rpc.codec import encode_sampling
from services.common.specdec.types import SamplingParams
from tests.support.processes import Processes
from tests.tracing.conftest import Traced, free_address


def page(address: str) -> dict[str, float]:
    """Return the sum of each of the page's samples over its labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_the_page_says_what_the_client_was_told(traced: Traced) -> None:
    address = free_address()
    # The page needs no collector.
    coordinator = traced.processes.coordinator(
        *(traced.target, traced.draft, "--metrics-listen", address),
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        wait_for_draft=False,
    )
    assert page(address)["process_resident_memory_bytes"] > 0
    stats = coordinator.generate(text="abcabc", gamma=3, max_tokens=20, stop={"ignore_eos": True}).result.speculation
    read = page(address)
    assert read["paceline_tokens_emitted_total"] == stats.emitted
    assert read["paceline_tokens_tested_total"] == stats.tested
    assert read["paceline_round_duration_seconds_count"] == 5 * stats.rounds
    assert read["gen_ai_server_request_duration_seconds_count"] == 1
    assert read["paceline_requests_running"] == 0
    assert coordinator.stop() == 0


def test_a_call_without_a_token_is_counted(traced: Traced, tmp_path: Path) -> None:
    address = free_address()
    (tmp_path / "tokens").write_text("0b1f6c1e9c6f4bd2\n")
    arguments = ("--tokens", str(tmp_path / "tokens"), "--metrics-listen", address)
    coordinator = traced.processes.coordinator(traced.target, None, *arguments)
    assert page(address)["paceline_server_refused_total"] == 0
    with coordinator.connected() as stub, pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(pb.GenerateRequest(text="abc"), timeout=30))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert page(address)["paceline_server_refused_total"] == 1
    assert coordinator.stop() == 0


def test_an_ngram_drafter_counts_its_sessions(tmp_path: Path) -> None:
    """What its autoscaling goes by; a drafter with a model has an engine that counts them."""
    address = free_address()
    sampling = encode_sampling(SamplingParams())
    identity = worker_pb2.ModelIdentity(model_id="ngram")
    start = worker_pb2.SessionStart(sampling=sampling, prompt_length=2, max_new_tokens=8, identity=identity)
    with Processes(tmp_path) as run:
        draft = run.draft("--drafter", "ngram", "--metrics-listen", address)
        draft.wait_until_serving()
        assert page(address)["paceline_worker_sessions"] == 0
        assert page(address)["paceline_worker_sessions_limit"] == 64
        with grpc.insecure_channel(draft.address) as channel:
            asked: queue.SimpleQueue[draft_pb2.ProposeRequest | None] = queue.SimpleQueue()
            call = draft_pb2_grpc.DraftServiceStub(channel).Propose(iter(asked.get, None))
            asked.put(draft_pb2.ProposeRequest(start=start, tokens=[0, 1], gamma=1))
            next(call)
            assert page(address)["paceline_worker_sessions"] == 1
            asked.put(None)
            assert list(call) == []
        assert page(address)["paceline_worker_sessions"] == 0


@pytest.mark.parametrize("wrong", ["127.0.0.1", "127.0.0.1:a", "127.0.0.1:99999", "192.0.2.1:9464"])
def test_an_address_that_cannot_be_had_is_named(tmp_path: Path, wrong: str) -> None:
    with Processes(tmp_path) as run:
        worker = run.draft("--metrics-listen", wrong)
        with pytest.raises(AssertionError, match="ended at once"):
            _ = worker.address
        assert worker.stop() == 1
        assert f"paceline-draft-worker: --metrics-listen is {wrong}: cannot listen there" in worker.log
