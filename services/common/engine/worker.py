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
from services.common.engine.draft_model import default_feature_layers, layer_list
from services.common.engine.engine import Engine, OnPass
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.options import EngineOptions
from services.common.engine.scheduler import PassLimits
from services.common.specdec.errors import StartupError

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
        gather=settings.gather,
    )


async def start_engine(
    settings: Any,
    on_death: Callable[[], None],
    on_pass: OnPass,
    load: Callable[[LoadOptions], LoadedModel] | None = None,
    features: str = "none",
) -> tuple[LoadedModel, Engine]:
    """Load a worker's model and start its engine, away from the event loop.

    In a thread that ends: one that has computed and lives on slows the passes down, see `Engine`.

    Args:
        settings: The worker's.
        on_death: See `Engine`.
        on_pass: See `Engine`.
        load: How the model is loaded; None for a causal language model.
        features: After how many layers hidden states are kept: "none", "auto", or numbers such as "7,15,22,30".

    Raises:
        StartupError: The model cannot be had, or not be served.
    """

    def start() -> tuple[LoadedModel, Engine]:
        loaded = (load or load_causal)(_load_options(settings))
        # A model is hundreds of thousands of objects that never go: the collector would walk them again and again.
        gc.freeze()
        options = dataclasses.replace(_engine_options(settings), feature_layers=_feature_layers(features, loaded))
        return loaded, Engine(loaded, options, on_death, on_pass)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as threads:
        return await asyncio.get_running_loop().run_in_executor(threads, start)


def _feature_layers(features: str, loaded: LoadedModel) -> tuple[int, ...]:
    if features == "none":
        return ()
    if features == "auto":
        count = loaded.config.num_hidden_layers
        try:
            layer_list(loaded.model.base_model, count)
        except ValueError as error:
            # Served all the same: only drafts that are fed with them cannot be.
            log.warning("no hidden states are kept for a draft: %s", str(error))
            return ()
        return default_feature_layers(count)
    try:
        return tuple(int(layer) for layer in features.split(","))
    except ValueError:
        raise StartupError(f"--features is {features!r}: must be auto, none, or numbers such as 7,15,22,30") from None


def load_causal(options: LoadOptions, depth: int | None = None) -> LoadedModel:
    """Load a model, fetching the default one first where it is asked for by the name `default`.

    Args:
        options: Which, and how.
        depth: See `load_model`.

    Raises:
        ModelFetchError: The default model could not be had.
        ModelLoadError: The model cannot be served.
    """
    if options.model == "default":
        folder = ensure_default_model(paceline_home(), log.info)
        options = dataclasses.replace(options, model=str(folder))
    log.info("loading %s", options.model)
    loaded = load_model(options, depth)
    log.info(
        "%s in %s on %s: %d ids, context %d",
        *(loaded.model_id, loaded.dtype, loaded.device, loaded.vocab_size, loaded.context_length),
    )
    return loaded
