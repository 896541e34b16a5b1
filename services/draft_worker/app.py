"""The draft worker as a process: listen, make the drafter, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import importlib

from paceline.v1 import draft_pb2_grpc, worker_pb2
from services.common.rpc.gauges import export_engine, export_outgrown, export_sessions
from services.common.rpc.logs import adopt_libraries
from services.common.rpc.passes import trace_pass
from services.common.rpc.server import Server, instance_name, run, stop_this_process
from services.common.rpc.worker import RECEIVE_MIB
from services.common.specdec.types import MAX_FEATURE_BYTES
from services.draft_worker.combined import CombinedProposer
from services.draft_worker.config import DraftSettings
from services.draft_worker.ngram import NgramProposer
from services.draft_worker.proposer import Proposer
from services.draft_worker.service import SERVICE, DraftService, Serving


async def serve(settings: DraftSettings) -> None:
    """Run until the stop signal.

    Raises:
        StartupError: The model or the address cannot be had.
    """
    server = Server(settings, [SERVICE], receive_mib=RECEIVE_MIB + (MAX_FEATURE_BYTES >> 20))
    service = DraftService(server, settings.idle_timeout_s, settings.max_streams)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)

    engines = contextlib.AsyncExitStack()

    async def load() -> None:
        proposer, info = await (_ngram(settings) if settings.drafter == "ngram" else _model(settings, engines))
        info.worker_id = instance_name(settings)
        service.attach(Serving(proposer, info))

    await run(server, load, engines.aclose)


async def _ngram(settings: DraftSettings) -> tuple[Proposer, worker_pb2.ModelInfo]:
    # No weights, no vocabulary: it fits every target.
    info = worker_pb2.ModelInfo(identity=worker_pb2.ModelIdentity(model_id="ngram"))
    proposer = NgramProposer(settings.ngram_min_tokens, settings.ngram_max_tokens, settings.max_sessions)
    export_sessions(lambda: proposer.sessions_open, settings.max_sessions)
    return proposer, info


async def _model(settings: DraftSettings, engines: contextlib.AsyncExitStack) -> tuple[Proposer, worker_pb2.ModelInfo]:
    # Imported here: an n-gram drafter needs no torch, not even installed. In a thread, for it takes seconds in which
    # health and signals have to be answered.
    await asyncio.to_thread(importlib.import_module, "services.draft_worker.models")
    adopt_libraries()
    from services.common.engine.worker import start_engine
    from services.draft_worker.feature_proposer import FeatureProposer
    from services.draft_worker.models import features_of, load, proposer_of

    loaded, engine = await start_engine(settings, stop_this_process, trace_pass, load(settings))
    engines.push_async_callback(engine.close)
    export_engine(engine.stats)
    info = worker_pb2.ModelInfo(
        identity=worker_pb2.ModelIdentity(
            model_id=loaded.model_id, weights_hash=loaded.weights_hash, dtype=loaded.dtype
        ),
        vocab_size=loaded.vocab_size,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        # One that looks back on a window can do so in a text of any length.
        context_length=0 if engine.needs_states else engine.context_length,
        eos_token_ids=loaded.eos_token_ids,
        features=features_of(loaded),
    )
    proposer = proposer_of(settings, loaded, engine)
    if isinstance(proposer, FeatureProposer):
        outgrown = proposer.outgrown
        export_outgrown(lambda: outgrown.sessions)
    if settings.ngram_first:
        proposer = CombinedProposer(proposer, settings.ngram_first, settings.ngram_max_tokens)
    return proposer, info
