"""Getting a worker's model ready, whatever the worker does with it."""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any

from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import LoadedModel, LoadOptions, load_model

log = logging.getLogger(__name__)


def options_from(settings: Any) -> LoadOptions:
    """Return the load options in a worker's settings, which have the same names."""
    return LoadOptions(**{field.name: getattr(settings, field.name) for field in dataclasses.fields(LoadOptions)})


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
