"""The drafters that are models: what a folder holds decides which."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from paceline.v1 import worker_pb2
from services.common.engine.default_model import NAME
from services.common.engine.draft_loading import is_draft, load_draft
from services.common.engine.engine import Engine
from services.common.engine.model import LoadedModel, LoadOptions
from services.common.engine.served_draft import ServedDraft
from services.common.engine.worker import load_causal
from services.common.specdec.errors import StartupError
from services.common.specdec.types import MAX_FEATURE_BYTES, MAX_GAMMA
from services.draft_worker.config import DraftSettings
from services.draft_worker.feature_proposer import FeatureProposer
from services.draft_worker.model_proposer import ModelProposer
from services.draft_worker.proposer import Proposer
from services.draft_worker.truncation import Truncation

DEFAULT_DRAFT: Final = Path(__file__).with_name("drafts") / NAME
"""The trained draft of the default target, which is part of this package."""

_LEAST_ANSWER: Final = 256
"""Tokens that a session has room for beside the window that it looks back on, at least."""


def load(settings: DraftSettings) -> Callable[[LoadOptions], LoadedModel]:
    """Return how the model is loaded: a draft that was made for its target, or any causal language model."""
    model = str(DEFAULT_DRAFT) if settings.model == "default" else settings.model
    if not is_draft(model):
        return load_causal
    return lambda options: load_draft(dataclasses.replace(options, model=model), settings.target_model)


def features_of(loaded: LoadedModel) -> worker_pb2.FeatureSpec | None:
    """Return which of the target's hidden states a draft is fed with, None where it is not."""
    model = loaded.model
    if not isinstance(model, ServedDraft) or not model.feature_width:
        return None
    # What has been accepted since they were asked for comes on top.
    window = min(model.window, MAX_FEATURE_BYTES // (2 * model.feature_width) - MAX_GAMMA - 1)
    return worker_pb2.FeatureSpec(layers=model.draft.config.feature_layers, width=model.feature_width, window=window)


def proposer_of(settings: DraftSettings, loaded: LoadedModel, engine: Engine) -> Proposer:
    """Return the drafter that an engine's model makes.

    Raises:
        StartupError: The pool holds less than a draft that is fed with hidden states looks back on.
    """
    truncation = Truncation(settings.draft_top_k, settings.draft_top_p)
    if not isinstance(loaded.model, ServedDraft):
        return ModelProposer(engine, truncation)
    ids = loaded.model.draft.head_ids.cpu().numpy().astype(np.uint32)
    features = features_of(loaded)
    if features is None:
        return ModelProposer(engine, truncation, ids)
    _check_room(settings, loaded, engine, features.window)
    return FeatureProposer(engine, features.window, features.width, ids, truncation)


def _check_room(settings: DraftSettings, loaded: LoadedModel, engine: Engine, window: int) -> None:
    # In less room the states of a window would be refused, in every round: the draft would be of no use, at full cost.
    least = min(window + _LEAST_ANSWER, loaded.context_length or window + _LEAST_ANSWER)
    if engine.context_length < least:
        raise StartupError(
            f"--kv-cache-memory is {settings.kv_cache_memory}: it holds {engine.context_length} tokens, must hold at "
            f"least {least} for a draft that looks back on {window}"
        )
