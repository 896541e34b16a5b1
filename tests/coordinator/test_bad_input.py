"""Bad requests: INVALID_ARGUMENT, a message with field, value and limit, and other requests go on meanwhile."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.support.cluster import Cluster, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import TargetScript
from tests.support.tokenizers import tokenizer_response

VOCAB = 6
CONTEXT = 100_000
LAW = close_law(distance=1.0, seed=1, vocab_size=VOCAB)
REFUSING_TEMPLATE = "{{ raise_exception('this model talks to nobody') }}"


def tokens(*ids: int) -> dict[str, Any]:
    return {"tokens": pb.TokenPrompt(ids=ids)}


def chat(*messages: tuple[int, str]) -> dict[str, Any]:
    made = [pb.ChatMessage(role=role, content=content) for role, content in messages]  # type: ignore[arg-type]
    return {"chat": pb.ChatPrompt(messages=made)}


def sampling(**fields: Any) -> dict[str, Any]:
    return tokens(0) | {"sampling": worker_pb2.SamplingParams(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return tokens(0) | {"stop": pb.StopConditions(**fields)}


# The fields of the request; then what its message says: field, value, limit.
BAD: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "no prompt": ({}, ["prompt", "empty", "exactly one of text, chat and tokens"]),
    "two prompts": (tokens(0) | {"text": "a"}, ["prompt", "text and tokens", "exactly one of"]),
    "three prompts": (
        tokens(0) | {"text": "a"} | chat((pb.ROLE_USER, "a")),
        ["prompt", "text and chat and tokens", "exactly one of"],
    ),
    "empty text": ({"text": ""}, ["text", "empty prompt", "at least one token"]),
    "empty tokens": (tokens(), ["tokens", "empty prompt", "at least one token"]),
    "empty chat": (chat(), ["chat.messages", "empty", "at least one message"]),
    "chat without text": (chat((pb.ROLE_USER, "")), ["chat", "empty prompt", "at least one token"]),
    "role unspecified": (
        chat((pb.ROLE_USER, "a"), (pb.ROLE_UNSPECIFIED, "b")),
        ["chat.messages[1].role", "is 0", "one of ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT"],
    ),
    "role unknown": (chat((99, "a")), ["chat.messages[0].role", "is 99", "one of ROLE_SYSTEM"]),
    "token -1": (tokens(0, -1), ["tokens.ids[1]", "is -1", f"0 to {VOCAB - 1}"]),
    "token V": (tokens(VOCAB, 0), ["tokens.ids[0]", f"is {VOCAB}", f"0 to {VOCAB - 1}"]),
    "temperature negative": (sampling(temperature=-0.5), ["sampling.temperature", "is -0.5", "0 (greedy), or 1e-6"]),
    "temperature NaN": (sampling(temperature=math.nan), ["sampling.temperature", "is nan", "0 (greedy), or 1e-6"]),
    "temperature inf": (sampling(temperature=math.inf), ["sampling.temperature", "is inf", "to 100"]),
    "temperature tiny": (sampling(temperature=1e-7), ["sampling.temperature", "is 1e-07", "1e-6 to 100"]),
    "temperature huge": (sampling(temperature=101), ["sampling.temperature", "is 101.0", "1e-6 to 100"]),
    "top_k negative": (sampling(top_k=-1), ["sampling.top_k", "is -1", "0 (keep all) or more"]),
    "top_p 0": (sampling(top_p=0.0), ["sampling.top_p", "is 0.0", "above 0 and at most 1"]),
    "top_p above 1": (sampling(top_p=1.5), ["sampling.top_p", "is 1.5", "above 0 and at most 1"]),
    "top_p NaN": (sampling(top_p=math.nan), ["sampling.top_p", "is nan", "above 0 and at most 1"]),
    "min_p negative": (sampling(min_p=-0.1), ["sampling.min_p", "is -0.1", "0 to 1"]),
    "min_p above 1": (sampling(min_p=1.1), ["sampling.min_p", "is 1.1", "0 to 1"]),
    "min_p NaN": (sampling(min_p=math.nan), ["sampling.min_p", "is nan", "0 to 1"]),
    "verification unknown": (
        tokens(0) | {"verification": 7, "seed": 1},
        ["verification", "is 7", "VERIFICATION_TOKEN (1) or VERIFICATION_COUPLED (2)"],
    ),
    "max_tokens 0": (tokens(0) | {"max_tokens": 0}, ["max_tokens", "is 0", f"1 to {CONTEXT - 1}"]),
    "max_tokens negative": (tokens(0) | {"max_tokens": -5}, ["max_tokens", "is -5", f"1 to {CONTEXT - 1}"]),
    "max_tokens beyond the context": (
        tokens(0, 1) | {"max_tokens": CONTEXT - 1},
        ["max_tokens", f"is {CONTEXT - 1}", f"1 to {CONTEXT - 2}", f"context of {CONTEXT} tokens less the prompt of 2"],
    ),
    "gamma negative": (tokens(0) | {"gamma": -1}, ["gamma", "is -1", "0 to 16"]),
    "gamma above the limit": (tokens(0) | {"gamma": 17}, ["gamma", "is 17", "0 to 16", "--max-gamma"]),
    "text longer than the context": (
        {"text": "a" * CONTEXT},
        ["text", f"{CONTEXT} characters", f"at most what {CONTEXT - 1} tokens"],
    ),
    "tokens longer than the context": (
        tokens(*[0] * CONTEXT),
        ["tokens", f"a prompt of {CONTEXT} tokens", f"at most {CONTEXT - 1}"],
    ),
    "stop string empty": (stop(strings=["x", ""]), ["stop.strings[1]", "0 characters", "1 to 256 characters"]),
    "stop string too long": (stop(strings=["x" * 257]), ["stop.strings[0]", "257 characters", "1 to 256 characters"]),
    "stop strings too many": (stop(strings=["x"] * 17), ["stop.strings", "17 strings", "at most 16"]),
    "stop id -1": (stop(token_ids=[-1]), ["stop.token_ids[0]", "is -1", f"0 to {VOCAB - 1}"]),
    "stop id V": (stop(token_ids=[1, VOCAB]), ["stop.token_ids[1]", f"is {VOCAB}", f"0 to {VOCAB - 1}"]),
    "stop ids too many": (stop(token_ids=[1] * 257), ["stop.token_ids", "257 ids", "at most 256"]),
    "request id too long": (
        tokens(0) | {"request_id": "x" * 129},
        ["request_id", "xxx...", "at most 128 printable ASCII characters"],
    ),
    "request id not ASCII": (tokens(0) | {"request_id": "größe"}, ["request_id", "größe", "printable ASCII"]),
    "request id not printable": (tokens(0) | {"request_id": "a\nb"}, ["request_id", "a\\nb", "printable ASCII"]),
}


# The same, made when they are needed.
HUGE: dict[str, tuple[Callable[[], dict[str, Any]], Sequence[str]]] = {
    "10 MB of text": (
        lambda: {"text": "a" * 10_000_000},
        ["text", "10000000 characters", f"at most what {CONTEXT - 1} tokens"],
    ),
    "10 MB of chat": (
        lambda: chat(*[(pb.ROLE_USER, "a" * 5_000_000)] * 2),
        ["chat.messages", "10000000 characters", f"at most what {CONTEXT - 1} tokens"],
    ),
    "four million tokens": (
        lambda: tokens(*[1] * 4_000_000),
        ["tokens", "a prompt of 4000000 tokens", f"at most {CONTEXT - 1}"],
    ),
    "200,000 empty messages": (
        lambda: chat(*[(pb.ROLE_USER, "")] * 200_000),
        ["chat.messages", "200000 messages", f"at most {CONTEXT - 1}"],
    ),
}


@contextlib.asynccontextmanager
async def cluster_with_a_stream() -> AsyncIterator[tuple[Cluster, Any]]:
    """Yield a cluster and an answer that it is streaming."""
    target = TargetScript(late_s=0.002)
    async with scripted_cluster(LAW, target=target, context_length=CONTEXT, wait_for_draft=False) as cluster:
        endless = pb.GenerateRequest(**tokens(0), gamma=0, max_tokens=CONTEXT - 1)
        stream = cluster.stub.Generate(endless, timeout=60)
        await anext(aiter(stream))
        try:
            yield cluster, stream
        finally:
            stream.cancel()


async def refusal(cluster: Cluster, fields: dict[str, Any]) -> grpc.aio.AioRpcError:
    call = cluster.stub.Generate(pb.GenerateRequest(**fields), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_and_others_go_on(name: str) -> None:
    fields, said = BAD[name]
    async with cluster_with_a_stream() as (cluster, stream):
        check(await refusal(cluster, fields), said)
        # The stream that runs has not noticed, and no worker was bothered with the bad one.
        for _ in range(3):
            await anext(aiter(stream))
        assert cluster.target.open_streams == 1


@pytest.mark.parametrize("name", HUGE)
async def test_a_huge_request_is_refused_before_it_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        pytest.fail("it was tokenised")

    make, said = HUGE[name]
    monkeypatch.setattr("services.coordinator.text._encode", read)
    monkeypatch.setattr("services.coordinator.text.TextCodec._render", read)
    async with cluster_with_a_stream() as (cluster, stream):
        check(await refusal(cluster, make()), said)
        for _ in range(3):
            await anext(aiter(stream))


async def test_a_request_over_the_message_limit_is_refused_with_both_sizes() -> None:
    async with cluster_with_a_stream() as (cluster, stream):
        error = await refusal(cluster, {"text": "a" * (20 << 20)})
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"vs. {16 << 20}" in (error.details() or "")
        await anext(aiter(stream))


def check(error: grpc.aio.AioRpcError, said: Sequence[str]) -> None:
    """Check the status and what the message says."""
    message = error.details() or ""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, message
    assert message.startswith(said[0])
    assert [words for words in said if words not in message] == []
    assert len(message) < 400


async def test_a_template_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(vocab_size: int) -> Any:
        response = tokenizer_response(vocab_size)
        response.chat_template = REFUSING_TEMPLATE
        return response

    monkeypatch.setattr("tests.support.scripted.tokenizer_response", refusing)
    async with cluster_with_a_stream() as (cluster, stream):
        error = await refusal(cluster, chat((pb.ROLE_USER, "a")))
        await anext(aiter(stream))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat.messages is ['user']" in (error.details() or "")
    assert "this model talks to nobody" in (error.details() or "")


async def test_a_model_without_a_template_refuses_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(vocab_size: int) -> Any:
        response = tokenizer_response(vocab_size)
        response.ClearField("chat_template")
        return response

    monkeypatch.setattr("tests.support.scripted.tokenizer_response", bare)
    async with cluster_with_a_stream() as (cluster, _):
        error = await refusal(cluster, chat((pb.ROLE_USER, "a")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat" in (error.details() or "")
    assert "no chat template" in (error.details() or "")


async def test_a_smaller_limit_of_gamma_is_named() -> None:
    async with scripted_cluster(LAW, wait_for_draft=False, max_gamma=2, default_gamma=1) as cluster:
        error = await refusal(cluster, tokens(0) | {"gamma": 3})
        fine = await cluster.generate([0], gamma=2, max_tokens=3)
    assert "gamma is 3: must be 0 to 2 (--max-gamma)" in (error.details() or "")
    assert len(fine.tokens) == 3
