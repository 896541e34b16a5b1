"""Getting a worker's model ready, whatever the worker does with it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.common.engine.admission import AdmissionLimits
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.engine import Engine
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.options import EngineOptions
from services.common.engine.scheduler import PassLimits

log = logging.getLogger(__name__)


def _load_options(settings: Any) -> LoadOptions:
    """Return the load options in a worker's settings, which have the same names."""
    return LoadOptions(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(LoadOptions)})


def _engine_options(settings: Any) -> EngineOptions:
    """Return the engine options in a worker's settings."""
    return EngineOptions(
        kv_cache_memory=settings.kv_cache_memory,
        passes=PassLimits(settings.prefill_chunk_tokens, settings.max_pass_tokens),
        admission=AdmissionLimits(settings.max_sessions, settings.max_waiting_sessions, settings.session_wait_s),
        compile=settings.compile,
        prefix_reuse=settings.prefix_reuse,
    )


async def start_engine(settings: Any, on_death: Callable[[], None]) -> tuple[LoadedModel, Engine]:
    """Load a worker's model and start its engine, away from the event loop.

    In a thread that ends: one that has computed and lives on slows the passes down, see `Engine`.

    Raises:
        StartupError: The model cannot be had, or not be served.
    """

    def start() -> tuple[LoadedModel, Engine]:
        loaded = _load(_load_options(settings))
        return loaded, Engine(loaded, _engine_options(settings), on_death)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as threads:
        return await asyncio.get_running_loop().run_in_executor(threads, start)


def _load(options: LoadOptions) -> LoadedModel:
    """Load a model, fetching the default one first where it is asked for by the name `default`.

    Raises:
        ModelFetchError: The default model could not be had.
        ModelLoadError: The model cannot be served.
    """
    if options.model == "default":
        folder = ensure_default_model(paceline_home(), log.info)
        options = dataclasses.replace(options, model=str(folder))
    log.info("loading %s", options.model)
    loaded = load_model(options)
    # A model is hundreds of thousands of objects that never go: without this the collector walks them again and again.
    gc.freeze()
    log.info(
        "%s in %s on %s: %d ids, context %d",
        *(loaded.model_id, loaded.dtype, loaded.device, loaded.vocab_size, loaded.context_length),
    )
    return loaded
