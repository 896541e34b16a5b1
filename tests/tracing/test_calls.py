"""Calls that do not end well have their span too."""

from __future__ import annotations

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.tracing.conftest import Traced
from tests.tracing.test_tree import GENERATE, SERVER

UNSET, ERROR = 0, 2


def test_a_refused_request(traced: Traced) -> None:
    with pytest.raises(grpc.RpcError):
        traced.coordinator.generate(text="abc", gamma=1_000, request_id="refused")
    span = traced.receiver.span(GENERATE, paceline__request__id="refused")
    assert (span.kind, span.status) == (SERVER, ERROR)
    assert span.attributes["rpc.system.name"] == "grpc"
    assert span.attributes["rpc.method"] == GENERATE
    assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"


def test_a_deadline_that_passes(traced: Traced) -> None:
    coordinator = traced.processes.coordinator(traced.target, None, "--default-deadline-s", "0.05")
    request = pb.GenerateRequest(text="abc", max_tokens=500, request_id="late", stop={"ignore_eos": True})
    with coordinator.connected() as stub, pytest.raises(grpc.RpcError):
        list(stub.Generate(request))
    span = traced.receiver.span(GENERATE, paceline__request__id="late")
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert span.status == ERROR


def test_a_cancelled_request(traced: Traced) -> None:
    request = pb.GenerateRequest(text="abc", max_tokens=500, request_id="cancelled", stop={"ignore_eos": True})
    with traced.coordinator.connected() as stub:
        call = stub.Generate(request)
        next(call)
        call.cancel()
    span = traced.receiver.span(GENERATE, paceline__request__id="cancelled")
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    # The client's choice is no failure of the service.
    assert span.status == UNSET
