"""What a kubelet is told, from the first moment of a process to its last."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import draft_pb2_grpc
from services.common.rpc.probes import ALIVE, READY
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.common.specdec.errors import StartupError
from tests.support.processes import Processes, Service

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
NAME = "paceline.v1.TargetService"


async def told(address: str) -> dict[str, int]:
    """Return what each name's health is, as a kubelet asks: a connection and a call each."""
    statuses = {}
    for name in (ALIVE, READY):
        async with grpc.aio.insecure_channel(address) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=10
            )
            statuses[name] = reply.status
    return statuses


def server_with(**settings: object) -> Server:
    return Server(ServerSettings.model_validate({"health_listen": "127.0.0.1:0", **settings}), [NAME])


async def test_alive_from_first_to_last_and_ready_in_between() -> None:
    server = server_with(drain_s=5)
    await server.listen()
    probes = server.health_address
    assert probes != server.address
    assert await told(probes) == {ALIVE: SERVING, READY: NOT_SERVING}
    await server.ready()
    assert await told(probes) == {ALIVE: SERVING, READY: SERVING}
    stopping = asyncio.create_task(server.stop())
    while not server.draining:
        await asyncio.sleep(0.01)
    assert await told(probes) == {ALIVE: SERVING, READY: NOT_SERVING}
    await stopping
    with pytest.raises(grpc.aio.AioRpcError):
        await told(probes)


async def test_the_port_serves_health_and_nothing_else() -> None:
    server = server_with()
    await server.listen()
    async with grpc.aio.insecure_channel(server.health_address) as channel:
        for method in (f"/{NAME}/GetModelInfo", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(method)(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.close()


async def test_a_taken_port_is_named() -> None:
    first = server_with()
    await first.listen()
    second = server_with(health_listen=first.health_address)
    with pytest.raises(StartupError, match=f"cannot listen on {first.health_address}"):
        await second.listen()
    await first.close()
    await second.close()


async def test_without_an_address_there_are_no_probes() -> None:
    server = Server(ServerSettings(), [NAME])
    await server.listen()
    await server.ready()
    assert server.health_address == ""
    await server.stop()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def probed(run: Processes) -> tuple[Service, str]:
    """Start a draft worker that answers probes."""
    address = f"127.0.0.1:{free_port()}"
    return run.draft("--drafter", "ngram", "--health-listen", address, "--shutdown-grace-s", "20"), address


async def test_a_draining_process_is_alive_and_not_ready_until_its_streams_have_ended(tmp_path: Path) -> None:
    with Processes(tmp_path) as run:
        worker, probes = await asyncio.to_thread(probed, run)
        await asyncio.to_thread(worker.wait_until_serving)
        assert await told(probes) == {ALIVE: SERVING, READY: SERVING}
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stream = draft_pb2_grpc.DraftServiceStub(channel).Propose()
            await stream.wait_for_connection()
            stopping = asyncio.create_task(asyncio.to_thread(worker.stop))
            while (await told(probes))[READY] != NOT_SERVING:
                await asyncio.sleep(0.05)
            for _ in range(5):
                assert await told(probes) == {ALIVE: SERVING, READY: NOT_SERVING}
                await asyncio.sleep(0.1)
            stream.cancel()
        assert await stopping == 0
