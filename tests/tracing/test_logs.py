"""What real processes log as JSON: every line an object, and a request's lines found by its id and its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.support.models import make_tiny_llama
from tests.support.processes import GREEDY, Processes, Service
from tests.tracing.test_tree import CLIENTS_SPAN, CLIENTS_TRACE

JSON = ("--log-format", "json")


def lines_of(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.splitlines()]


def test_a_requests_lines_are_found_by_its_id_and_its_trace(tmp_path: Path) -> None:
    with Processes(tmp_path) as run:
        target = run.target("--model", str(make_tiny_llama(tmp_path / "model")), *JSON, "--worker-id", "target-0")
        draft = run.draft("--drafter", "ngram", *JSON)
        coordinator = run.coordinator(target, draft, *JSON)
        request = pb.GenerateRequest(
            text="abcabc", gamma=2, max_tokens=400, request_id="r-7", sampling=GREEDY, stop={"ignore_eos": True}
        )
        with coordinator.connected() as stub:
            call = stub.Generate(
                request, timeout=60, metadata=(("traceparent", f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"),)
            )
            next(call)
            draft.kill()
            list(call)
        told = [line for line in lines_of(coordinator) if line.get("request_id") == "r-7"]
        assert any(line["message"].startswith("draft lost: ") for line in told)
        assert {line["trace_id"] for line in told} == {CLIENTS_TRACE}
        assert {line["service"] for line in told} == {"paceline-coordinator"}
        assert coordinator.stop() == target.stop() == 0
        assert [line["message"] for line in lines_of(coordinator)][-1] == "SIGTERM: draining"
        loaded = lines_of(target)
        assert {(line["service"], line["instance"]) for line in loaded} == {("paceline-target-worker", "target-0")}
        assert any(line["message"].startswith("warm after ") for line in loaded)


def test_why_a_service_cannot_start_is_a_line_too(tmp_path: Path) -> None:
    with Processes(tmp_path) as run:
        worker = run.draft("--metrics-listen", "nowhere", *JSON)
        with pytest.raises(AssertionError, match="ended at once"):
            _ = worker.address
        assert worker.stop() == 1
        (line,) = lines_of(worker)
    assert line["level"] == "CRITICAL"
    assert line["message"].startswith("paceline-draft-worker: --metrics-listen is nowhere")
