"""A coordinator and its workers with certificates on every link."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from services.common.rpc.tls import ClientFiles, ClientTls
from tests.support.certificates import Authority
from tests.support.cluster import Cluster, Reply, scripted_cluster
from tests.support.laws import close_law
from tests.support.scripts import TargetScript

LAW = close_law(distance=0.5, seed=2)


class Parties:
    """Certificates of everybody, in files."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.renew()

    def renew(self) -> None:
        """Give everybody another certificate."""
        self.worker = self.authority.issue("worker", dns=["worker"])
        self.coordinator = self.authority.issue("coordinator", dns=["coordinator"])

    def settings(self, coordinator: str = "coordinator") -> dict[str, Any]:
        """Return what `scripted_cluster` takes; the coordinator shows a certificate of this name."""
        shown = (
            self.coordinator if coordinator == "coordinator" else self.authority.issue(coordinator, dns=[coordinator])
        )
        return {
            **self.coordinator.as_server,
            "tls": ClientTls(ClientFiles(self.authority.cert)),
            "worker_settings": {
                **self.worker.as_server,
                "tls_ca": self.authority.cert,
                "tls_clients": "coordinator",
            },
            "workers_tls_ca": self.authority.cert,
            "workers_tls_cert": shown.cert,
            "workers_tls_key": shown.key,
            "workers_tls_name": "worker",
        }


async def test_answers_are_those_of_plain_text(tmp_path: Path) -> None:
    async with scripted_cluster(LAW) as plain:
        expected = await plain.generate([0, 1], gamma=3, seed=5)
    async with scripted_cluster(LAW, **Parties(tmp_path).settings()) as cluster:
        reply = await cluster.generate([0, 1], gamma=3, seed=5)
        assert reply.tokens == expected.tokens
        assert reply.result.speculation.accepted == expected.result.speculation.accepted
        async with grpc.aio.insecure_channel(cluster.coordinator.address) as channel:
            call = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(pb.GenerateRequest(), timeout=20)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_all_certificates_are_replaced_under_running_answers(tmp_path: Path) -> None:
    parties = Parties(tmp_path)
    slow = TargetScript(late_s=0.05)
    async with scripted_cluster(LAW, **parties.settings(), target=slow) as cluster:
        running = [asyncio.create_task(answer(cluster, seed, 60)) for seed in range(4)]
        while cluster.target.open_streams < 4:
            await asyncio.sleep(0.01)
        parties.renew()
        replies = await asyncio.gather(*running)
        assert cluster.target.streams == cluster.draft.streams == 4, "each stream ended where it began"
        # On a new connection: the files were looked at in the meantime.
        later = await answer(cluster, 0, 60)
        assert later.tokens == replies[0].tokens
        assert not any(reply.result.speculation.degraded_rounds for reply in replies)


async def test_a_coordinator_by_another_name_finds_no_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def never_ready() -> None:
        async with scripted_cluster(LAW, **Parties(tmp_path).settings("draft-worker")):
            raise AssertionError("it found them")

    starting = asyncio.create_task(never_ready())
    async with asyncio.timeout(20):
        while "PERMISSION_DENIED" not in caplog.text:
            await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(
        "no answer of a target worker: PERMISSION_DENIED: a certificate of draft-worker may not call this" in message
        for message in told
    ), told


async def answer(cluster: Cluster, seed: int, length: int) -> Reply:
    return await cluster.generate([0, 1], gamma=2, seed=seed, max_tokens=length)
