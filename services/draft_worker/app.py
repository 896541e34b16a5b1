"""The draft worker as a process: listen, make the drafter, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import os

from paceline.v1 import draft_pb2_grpc, worker_pb2
from services.common.rpc.server import Server, instance_name, stop_signal, unless_stopped
from services.common.rpc.telemetry import configure_telemetry
from services.draft_worker.config import DraftSettings
from services.draft_worker.ngram import NgramProposer
from services.draft_worker.proposer import Proposer
from services.draft_worker.service import SERVICE, DraftService, Serving


async def serve(settings: DraftSettings) -> None:
    """Run until the stop signal.

    Raises:
        SystemExit: The model or the address cannot be had; the message says why.
    """
    async with stop_signal() as stopped:
        server = Server(settings, [SERVICE])
        service = DraftService()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)
        worker_id = instance_name(settings.worker_id, await server.listen())
        configure_telemetry("paceline-draft-worker", worker_id)
        if not await unless_stopped(stopped, asyncio.create_task(_load(settings, service, worker_id))):
            # A model load cannot be interrupted, and there is nothing to finish.
            os._exit(0)
        await server.ready()
        await stopped.wait()
        await server.stop()


async def _load(settings: DraftSettings, service: DraftService, worker_id: str) -> None:
    proposer: Proposer
    if settings.drafter == "ngram":
        proposer = NgramProposer(settings.ngram_min_tokens, settings.ngram_max_tokens)
        # No weights, no vocabulary: it fits every target.
        info = worker_pb2.ModelInfo(identity=worker_pb2.ModelIdentity(model_id="ngram"))
    else:
        proposer, info = await _load_model(settings)
    info.worker_id = worker_id
    await proposer.warm_up()
    service.attach(Serving(proposer, info))


async def _load_model(settings: DraftSettings) -> tuple[Proposer, worker_pb2.ModelInfo]:
    # Imported here: an n-gram drafter needs no torch, not even installed.
    from services.common.engine.default_model import ModelFetchError
    from services.common.engine.executor import PassExecutor
    from services.common.engine.model import ModelLoadError
    from services.common.engine.worker import options_from, prepare
    from services.draft_worker.model_proposer import ModelProposer

    try:
        loaded = await asyncio.to_thread(prepare, options_from(settings))
    except (ModelFetchError, ModelLoadError) as error:
        raise SystemExit(f"draft worker: {error}") from error
    info = worker_pb2.ModelInfo(
        identity=worker_pb2.ModelIdentity(
            model_id=loaded.model_id, weights_hash=loaded.weights_hash, dtype=loaded.dtype
        ),
        vocab_size=loaded.vocab_size,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        context_length=loaded.context_length,
        eos_token_ids=loaded.eos_token_ids,
    )
    return ModelProposer(loaded, PassExecutor(), settings.max_sessions, settings.prefill_chunk_tokens), info
