"""Who is refused by a link with TLS, how, and that nobody else notices."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.tls import ClientFiles
from tests.support.certificates import Authority
from tests.tls.links import Conversation, channel_to, refusal_of, serving, shown_on

COORDINATOR = "spiffe://cluster.local/ns/paceline/sa/coordinator"
UNAVAILABLE, PERMISSION_DENIED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED


def coordinator_files(authority: Authority) -> ClientFiles:
    pair = authority.issue("coordinator", dns=["coordinator"], uris=[COORDINATOR])
    return ClientFiles(authority.cert, pair.cert, pair.key)


async def test_all_who_are_refused_and_one_who_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    good = coordinator_files(authority)
    settings = {**authority.issue("worker").as_server, "tls_ca": authority.cert, "tls_clients": f"ops, {COORDINATOR}"}

    def showing(by: Authority, name: str, **fields: object) -> ClientFiles:
        pair = by.issue(name, **fields)  # type: ignore[arg-type]
        return dataclasses.replace(good, cert=pair.cert, key=pair.key)

    refused = {
        "plain text": (None, UNAVAILABLE, ""),
        "no certificate": (ClientFiles(authority.cert), UNAVAILABLE, ""),
        "of another authority": (showing(other, "stranger", uris=[COORDINATOR]), UNAVAILABLE, ""),
        "expired": (showing(authority, "old", uris=[COORDINATOR], days=-1), UNAVAILABLE, ""),
        "believes another authority": (dataclasses.replace(good, ca=other.cert), UNAVAILABLE, "VERIFY_FAILED"),
        "wants another name": (dataclasses.replace(good, server_name="target"), UNAVAILABLE, "Hostname"),
        "another service": (showing(authority, "draft", dns=["draft"]), PERMISSION_DENIED, "a certificate of draft "),
        "without a name": (showing(authority, "nobody", loopback=False), PERMISSION_DENIED, "of no name"),
        "nearly the name": (showing(authority, "near", uris=[COORDINATOR + "2"]), PERMISSION_DENIED, COORDINATOR + "2"),
        "a wildcard": (showing(authority, "wild", dns=["*"]), PERMISSION_DENIED, "of * may not"),
        "the name as a common name": (showing(authority, "ops"), PERMISSION_DENIED, "of no name"),
    }
    async with serving(**settings) as server, channel_to(server, good) as channel:
        stream = Conversation(channel)
        assert await stream.goes_on()
        for who, (files, code, words) in refused.items():
            came, details = await refusal_of(server, files)
            assert (who, came) == (who, code), details
            assert words in details, who
        assert await stream.goes_on()
        assert await shown_on(channel) == Path(good.cert).read_text()
        await stream.end()
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "refused" in r.getMessage()]
    assert len(told) == 4, "each set of names once"


async def test_a_server_whose_certificate_has_expired_is_not_believed(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(**authority.issue("worker", days=-1).as_server) as server:
        code, details = await refusal_of(server, ClientFiles(authority.cert))
        assert code is UNAVAILABLE
        assert "VERIFY_FAILED" in details


async def test_without_an_authority_nobody_is_asked_for_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with serving(**authority.issue("worker").as_server) as server:
        for files in (ClientFiles(authority.cert), coordinator_files(authority)):
            async with channel_to(server, files) as channel:
                assert await shown_on(channel) == ""


async def test_a_name_for_the_server_in_place_of_its_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("worker", dns=["workers.paceline"], loopback=False)
    async with serving(**pair.as_server) as server:
        async with channel_to(server, ClientFiles(authority.cert, server_name="workers.paceline")) as channel:
            assert await shown_on(channel) == ""
        code, _ = await refusal_of(server, ClientFiles(authority.cert))
        assert code is UNAVAILABLE


async def test_probes_need_no_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    settings = {**authority.issue("worker").as_server, "tls_ca": authority.cert, "tls_clients": "nobody"}
    request = health_pb2.HealthCheckRequest(service="ready")
    async with serving(**settings, health_listen="127.0.0.1:0") as server:
        channel = grpc.aio.insecure_channel(server.health_address)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close()


async def test_reflection_is_for_those_who_are_let_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    settings = {**authority.issue("worker").as_server, "tls_ca": authority.cert, "tls_clients": "nobody"}
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with serving(**settings) as server, channel_to(server, coordinator_files(authority)) as channel:
        call = channel.stream_stream(method)()
        await call.write(b"")
        await call.done_writing()
        assert await call.code() is PERMISSION_DENIED
