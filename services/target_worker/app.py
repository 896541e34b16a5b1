"""The target worker as a process: listen, load, warm up, serve, drain."""

from __future__ import annotations

import contextlib

from paceline.v1 import target_pb2_grpc, worker_pb2
from services.common.engine.worker import start_engine
from services.common.rpc.gauges import export_engine
from services.common.rpc.logs import adopt_libraries
from services.common.rpc.passes import trace_pass
from services.common.rpc.server import Server, instance_name, run, stop_this_process
from services.common.rpc.worker import RECEIVE_MIB
from services.target_worker.config import TargetSettings
from services.target_worker.service import SERVICE, TargetService, serving
from services.target_worker.verifier import Verifier


async def serve(settings: TargetSettings) -> None:
    """Run until the stop signal.

    Raises:
        StartupError: The model or the address cannot be had.
    """
    adopt_libraries()
    server = Server(settings, [SERVICE], receive_mib=RECEIVE_MIB)
    service = TargetService(server, settings.idle_timeout_s, settings.max_streams)
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
    engines = contextlib.AsyncExitStack()

    async def load() -> None:
        loaded, engine = await start_engine(settings, stop_this_process, trace_pass, features=settings.features)
        engines.push_async_callback(engine.close)
        export_engine(engine.stats)
        kept = engine.features
        features = worker_pb2.FeatureSpec(layers=kept.layers, width=kept.width) if kept is not None else None
        name = instance_name(settings)
        service.attach(serving(loaded, Verifier(engine), engine.context_length, name, features))

    await run(server, load, engines.aclose)
