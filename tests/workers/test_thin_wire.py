"""Two tiny models behind real services: the tokens of a seed are the same over rows in part and over whole rows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, draft_pb2_grpc, target_pb2_grpc, worker_pb2
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from services.draft_worker import service as drafting
from services.draft_worker.model_proposer import ModelProposer
from services.draft_worker.truncation import Truncation
from services.target_worker.service import TargetService, serving
from services.target_worker.verifier import Verifier
from tests.support.engines import StartEngine, load
from tests.support.models import make_tiny_llama

SERVICES = ["paceline.v1.TargetService", "paceline.v1.DraftService"]


async def answers(address: str, verification: int, **settings: Any) -> list[pb.GenerateResult | list[int]]:
    """Return the tokens of two seeds, and the last one's result."""
    options = {"listen": "127.0.0.1:0", "target": address, "draft": address, "shutdown_grace_s": 0} | settings
    coordinator = Coordinator(CoordinatorSettings.model_validate(options | {"draft_timeout_s": 60}))
    await coordinator.start()
    found: list[pb.GenerateResult | list[int]] = []
    try:
        await asyncio.wait_for(coordinator.wait_until_ready(), 30)
        async with grpc.aio.insecure_channel(coordinator.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            for seed in (1, 2):
                request = pb.GenerateRequest(
                    tokens=pb.TokenPrompt(ids=[5, 6, 7]),
                    gamma=3,
                    seed=seed,
                    max_tokens=40,
                    stop=pb.StopConditions(ignore_eos=True),
                    verification=worker_pb2.Verification.ValueType(verification),
                )
                while True:
                    replies = [reply async for reply in stub.Generate(request)]
                    # The draft is looked for once the target has been found.
                    if not replies[-1].result.speculation.degraded_rounds:
                        break
                    await asyncio.sleep(0.1)
                found.append([token.id for reply in replies for token in reply.chunk.tokens])
            found.append(replies[-1].result)
    finally:
        await coordinator.stop()
    return found


async def test_tokens_are_those_of_whole_rows(tmp_path: Path, start_engine: StartEngine) -> None:
    loaded, draft = (
        load(make_tiny_llama(tmp_path / "target", seed=1)),
        load(make_tiny_llama(tmp_path / "draft", seed=1)),
    )
    target_engine, draft_engine = await start_engine(loaded), await start_engine(draft)
    server = Server(ServerSettings(), SERVICES)
    target, drafter = TargetService(server, 30.0, 8), drafting.DraftService(server, 30.0, 8)
    served = serving(loaded, Verifier(target_engine), target_engine.context_length, "target")
    target.attach(served)
    drafter.attach(drafting.Serving(ModelProposer(draft_engine, Truncation(top_k=12)), served.info))
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server.grpc)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(drafter, server.grpc)
    address = await server.listen()
    await server.ready()
    try:
        for rule in (worker_pb2.VERIFICATION_TOKEN, worker_pb2.VERIFICATION_COUPLED):
            whole = await answers(address, rule, partial_rows=False)
            part = await answers(address, rule, row_head=4)
            assert part[:2] == whole[:2]
            sizes = [each[2].speculation.per_round for each in (whole, part)]  # type: ignore[union-attr]
            assert sum(row.p_bytes for row in sizes[1]) < sum(row.p_bytes for row in sizes[0])
            fetched = sum(row.fetched_rows for row in sizes[1])
            assert fetched == 0 if rule == worker_pb2.VERIFICATION_COUPLED else fetched > 0
    finally:
        await server.grpc.stop(None)
