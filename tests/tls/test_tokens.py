"""Bearer tokens: who is refused, how, and that no token is ever told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.guards import BearerTokens
from services.common.rpc.tokens import Tokens
from services.common.specdec.errors import StartupError
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from tests.support.certificates import Authority
from tests.tls.links import NAME, channel_to, serving, shown_on
from tests.tls.test_command import run

FIRST, SECOND, WRONG = "0123456789abcdef", "second~token+of/some-length==", "fedcba9876543210"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# Who may call.\n\n  chat : {FIRST}  \n{SECOND}\n")
    return path


def bearer(token: str) -> Sequence[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


def test_those_of_the_file_are_good_and_no_others(path: Path) -> None:
    tokens = Tokens(str(path))
    assert all(tokens.accept(token) for token in (FIRST, SECOND))
    near = (FIRST[:-1], FIRST + "0", FIRST.upper(), f"chat : {FIRST}", "chat", "", "é" * 16, "\ud800" * 16)
    assert not any(tokens.accept(token) for token in (*near, WRONG))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no token in it"),
        ("# none\n", "there is no token in it"),
        (f"{FIRST}\nshort-one\n", "line 2: no token: must be 16 characters or more"),
        (f"{FIRST} {SECOND}\n", "line 1: no token"),
        (f"{FIRST}é\n", "line 1: no token"),
    ],
)
def test_a_file_that_cannot_be_used(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(StartupError) as refused:
        Coordinator(CoordinatorSettings(tokens=str(path)))
    assert f"--tokens {path}: {message}" in str(refused.value)
    assert FIRST not in str(refused.value)
    assert "short-one" not in str(refused.value)


async def test_calls_without_a_known_token_are_refused_and_streams_go_on(path: Path) -> None:
    async with serving([BearerTokens(Tokens(str(path)))]) as server, channel_to(server, None) as channel:
        stream = channel.stream_stream(f"/{NAME}/Echo")(metadata=bearer(FIRST))
        refused = {
            (): "no authorization in the metadata",
            bearer(WRONG): "no known `Bearer TOKEN`",
            bearer(FIRST[:-1]): "no known `Bearer TOKEN`",
            bearer(""): "no known `Bearer TOKEN`",
            (("authorization", FIRST),): "no known `Bearer TOKEN`",
            (("authorization", f"Basic {FIRST}"),): "no known `Bearer TOKEN`",
            (*bearer(FIRST), *bearer(WRONG)): "2 authorization in the metadata",
        }
        for metadata, words in refused.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await shown_on(channel, metadata)
            assert error.value.code() is UNAUTHENTICATED
            assert words in (error.value.details() or "")
            assert FIRST[:-1] not in str(error.value)
        for metadata in (bearer(FIRST), bearer(SECOND), (("authorization", f"bearer {FIRST}"),)):
            await shown_on(channel, metadata)
        await stream.write(b"still there")
        assert await stream.read() == b"still there"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


async def test_reflection_and_unknown_methods_are_asked_too_and_health_is_not(path: Path) -> None:
    async with serving([BearerTokens(Tokens(str(path)))]) as server, channel_to(server, None) as channel:
        for method in ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", f"{NAME}/Nothing"):
            # Refused before anything is sent.
            assert await channel.stream_stream(f"/{method}")().code() is UNAUTHENTICATED
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=NAME), timeout=10
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_changed_file_counts_and_a_bad_one_does_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokens = Tokens(str(path), look_every_s=0)
    path.write_text(f"{WRONG}\n")
    assert tokens.accept(WRONG)
    assert not tokens.accept(FIRST)
    path.write_text("")
    path.unlink()
    assert tokens.accept(WRONG)
    assert tokens.accept(WRONG)
    path.write_text(f"{FIRST}\n")
    assert tokens.accept(FIRST)
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "INFO"]
    assert not any(token in caplog.text for token in (FIRST, SECOND, WRONG))


async def test_the_command_sends_a_token(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    authority = Authority(tmp_path)
    settings = {**authority.issue("coordinator").as_server, "tokens": str(path), "target": "127.0.0.1:1", "draft": ""}
    coordinator = Coordinator(CoordinatorSettings.model_validate({"listen": "127.0.0.1:0", **settings}))
    await coordinator.start()
    # Without a target it is never ready, and a channel that watches health would not let the call out.
    await coordinator._server.ready()
    own = tmp_path / "own"
    own.write_text(f"{SECOND}\n")
    address = ("--address", coordinator.address, "--tls-ca", authority.cert)
    try:
        by_file, by_variable, without = await asyncio.gather(
            run(*address, "--token-file", str(own)),
            run(*address, env={"PACELINE_TOKEN": WRONG}),
            run(*address),
        )
    finally:
        await coordinator.stop()
    assert "no target worker found yet" in by_file.stderr
    assert "UNAUTHENTICATED: the authorization in the metadata is no known" in by_variable.stderr
    assert "UNAUTHENTICATED: no authorization in the metadata" in without.stderr
    everything = caplog.text + json.dumps([by_file, by_variable, without])
    assert not any(token in everything for token in (FIRST, SECOND, WRONG))


@pytest.mark.parametrize("text", ["short", f"{FIRST} {SECOND}", ""])
async def test_a_file_of_something_else_is_not_sent(tmp_path: Path, text: str) -> None:
    (tmp_path / "own").write_text(text)
    refused = await run("--address", "127.0.0.1:1", "--token-file", str(tmp_path / "own"))
    assert refused.code == 1
    assert f"--token-file {tmp_path / 'own'}: no token: must be 16 characters" in " ".join(refused.stderr.split())
