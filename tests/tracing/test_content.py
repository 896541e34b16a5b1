"""Three real processes: nothing of a prompt or an answer in what they log and export."""

from __future__ import annotations

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from tests.tracing.conftest import Traced
from tests.tracing.test_tree import GENERATE, trace_of

MARK = "xylophones are loud"


def test_logs_and_spans_of_all_three(traced: Traced) -> None:
    reply = traced.coordinator.generate(
        text=MARK, gamma=3, max_tokens=24, request_id="marked", stop={"ignore_eos": True}
    )
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, content=MARK)])
    errors = []
    for request_id, fields in {
        "marked-2": {"text": MARK, "max_tokens": 10**6},
        "marked-3": {"text": MARK, "stop": {"strings": [MARK * 20]}},
        "marked-4": {"chat": chat, "gamma": 1_000},
    }.items():
        with pytest.raises(grpc.RpcError) as refused:
            traced.coordinator.generate(request_id=request_id, **fields)
        errors.append(str(refused.value))
    names = ("marked", "marked-2", "marked-3", "marked-4")
    requests = [traced.receiver.span(GENERATE, paceline__request__id=name) for name in names]
    assert requests[0].trace_id == reply.result.trace_id
    assert len({span.service for span in trace_of(traced, reply).spans}) == 3
    told = "\n".join(
        [
            *(service.log for service in (traced.target, traced.draft, traced.coordinator)),
            *traced.receiver.texts,
            *errors,
        ]
    )
    assert len(reply.tokens) == 24
    for content in (MARK, reply.text, str(reply.tokens)[1:-1], str(list(reply.result.prompt_token_ids))[1:-1]):
        assert len(content) > 10
        assert content not in told
    assert "stop.strings[0]" in told
