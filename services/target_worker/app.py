"""The target worker as a process: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio

from paceline.v1 import target_pb2_grpc
from services.common.engine.executor import PassExecutor
from services.common.engine.worker import options_from, prepare
from services.common.rpc.server import Server, instance_name, run
from services.target_worker.config import TargetSettings
from services.target_worker.service import SERVICE, TargetService, serving
from services.target_worker.verifier import Verifier


async def serve(settings: TargetSettings) -> None:
    """Run until the stop signal.

    Raises:
        StartupError: The model or the address cannot be had.
    """
    server = Server(settings, [SERVICE])
    service = TargetService()
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
    executor = PassExecutor()

    async def load() -> None:
        loaded = await asyncio.to_thread(prepare, options_from(settings))
        verifier = Verifier(loaded, executor, settings.max_sessions, settings.prefill_chunk_tokens)
        await verifier.warm_up()
        service.attach(serving(loaded, verifier, instance_name(settings)))

    async def close() -> None:
        executor.close()

    await run(server, load, close)
