"""Getting a worker's model ready, whatever the worker does with it."""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

from services.common.engine.admission import AdmissionLimits
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.options import EngineOptions
from services.common.engine.scheduler import PassLimits

log = logging.getLogger(__name__)


def load_options(settings: Any) -> LoadOptions:
    """Return the load options in a worker's settings, which have the same names."""
    return LoadOptions(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(LoadOptions)})


def engine_options(settings: Any) -> EngineOptions:
    """Return the engine options in a worker's settings."""
    return EngineOptions(
        kv_cache_memory=settings.kv_cache_memory,
        passes=PassLimits(settings.prefill_chunk_tokens, settings.max_pass_tokens),
        admission=AdmissionLimits(settings.max_sessions, settings.max_waiting_sessions, settings.session_wait_s),
        compile=settings.compile,
    )


def prepare(options: LoadOptions) -> LoadedModel:
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
