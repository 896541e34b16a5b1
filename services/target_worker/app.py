"""The target worker as a process: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import os

from paceline.v1 import target_pb2_grpc
from services.common.engine.default_model import ModelFetchError
from services.common.engine.executor import PassExecutor
from services.common.engine.model import ModelLoadError
from services.common.engine.worker import options_from, prepare
from services.common.rpc.server import Server, instance_name, stop_signal, unless_stopped
from services.common.rpc.telemetry import configure_telemetry
from services.target_worker.config import TargetSettings
from services.target_worker.service import SERVICE, TargetService, serving
from services.target_worker.verifier import Verifier


async def serve(settings: TargetSettings) -> None:
    """Run until the stop signal.

    Raises:
        SystemExit: The model or the address cannot be had; the message says why.
    """
    async with stop_signal() as stopped:
        server = Server(settings, [SERVICE])
        service = TargetService()
        target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
        worker_id = instance_name(settings.worker_id, await server.listen())
        configure_telemetry("paceline-target-worker", worker_id)
        if not await unless_stopped(stopped, asyncio.create_task(_load(settings, service, worker_id))):
            # A model load cannot be interrupted, and there is nothing to finish.
            os._exit(0)
        await server.ready()
        await stopped.wait()
        await server.stop()


async def _load(settings: TargetSettings, service: TargetService, worker_id: str) -> None:
    try:
        loaded = await asyncio.to_thread(prepare, options_from(settings))
    except (ModelFetchError, ModelLoadError) as error:
        raise SystemExit(f"target worker: {error}") from error
    verifier = Verifier(loaded, PassExecutor(), settings.max_sessions, settings.prefill_chunk_tokens)
    await verifier.warm_up()
    service.attach(serving(loaded, verifier, worker_id))
