"""Loads a trained draft, with the parts of its target that it uses."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
from pathlib import Path
from typing import Any

from services.common.engine import identity
from services.common.engine.default_model import NAME as DEFAULT_NAME
from services.common.engine.draft_model import CONFIG_FILE, WEIGHTS_FILE, DraftConfig, DraftModel
from services.common.engine.model import LoadedModel, LoadOptions, ModelLoadError
from services.common.engine.served_draft import ServedDraft
from services.common.engine.worker import load_causal

log = logging.getLogger(__name__)


def is_draft(model: str) -> bool:
    """Return whether a model is a folder that `paceline distill` has made."""
    return (Path(model).expanduser() / CONFIG_FILE).is_file()


def load_draft(options: LoadOptions, target_model: str = "") -> LoadedModel:
    """Load a trained draft; of its target the embeddings and the head are read, and as little else as can be.

    Args:
        options: Name the draft's folder.
        target_model: The target's folder, hub id or `default`; empty for the one that the draft names.

    Raises:
        ModelLoadError: One of them cannot be loaded, or they do not belong together.
    """
    folder = Path(options.model).expanduser()
    config = _config(folder)
    # One layer comes along: not every kind of model can be without.
    target = load_causal(dataclasses.replace(options, model=target_model or _target_of(config)), depth=1)
    if target.tokenizer_fingerprint != config.tokenizer_fingerprint:
        raise ModelLoadError(
            f"{folder} is a draft for {config.target}: its tokenizer is {config.tokenizer_fingerprint[:12]}, "
            f"{target.model_id} has {target.tokenizer_fingerprint[:12]}"
        )
    try:
        draft = DraftModel.load(folder, target.model, target.config)
    except (OSError, KeyError, IndexError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelLoadError(
            f"The weights of {folder} ({WEIGHTS_FILE}) do not fit {target.model_id}: {reason}"
        ) from error
    draft.requires_grad_(requires_grad=False)
    served: Any = ServedDraft(draft.to(target.device)).eval()
    log.info("%s: %d of %d ids, fed with layers %s", folder.name, len(draft.head_ids), target.vocab_size, _fed(config))
    return dataclasses.replace(
        target,
        model=served,
        config=served.config,
        forward_arguments=frozenset(inspect.signature(served.forward).parameters),
        model_id=folder.resolve().name,
        weights_hash=identity.weights_hash(draft),
    )


def _config(folder: Path) -> DraftConfig:
    try:
        return DraftConfig.read(folder)
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error


def _target_of(config: DraftConfig) -> str:
    """Return what to load as the target that a draft names."""
    if config.target in ("default", DEFAULT_NAME):
        return "default"
    if Path(config.target).expanduser().is_dir() or config.target.count("/") == 1:
        return config.target
    raise ModelLoadError(f"The draft's target is {config.target!r}, which is not here: say where with --target-model")


def _fed(config: DraftConfig) -> str:
    return ", ".join(map(str, config.feature_layers)) or "none"
