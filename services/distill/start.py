"""What a new folder may be given to begin with: another draft's weights, and how questions begin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from services.common.engine.draft_model import CONFIG_FILE, WEIGHTS_FILE, DraftConfig
from services.common.engine.model import LoadedModel
from services.distill.errors import DistillError


@dataclass(frozen=True, slots=True)
class Start:
    """A draft of the same target whose weights a new one begins with.

    Attributes:
        weights: Its file.
        key: SHA-256 of the file.
        config: What it is made of.
        head_ids: int64[head], the tokens that it can propose.
    """

    weights: Path
    key: str
    config: DraftConfig
    head_ids: npt.NDArray[np.int64]


def read_start(folder: Path, loaded: LoadedModel) -> Start:
    """Read the draft that a new one is to begin as.

    Raises:
        DistillError: There is none, or it is not of this target.
    """
    weights = folder / WEIGHTS_FILE
    try:
        config = DraftConfig.read(folder)
        # The ids alone: numpy does not know the weights' bfloat16.
        with weights.open("rb") as file:
            key = hashlib.file_digest(file, "sha256").hexdigest()
        head_ids = _head_ids(weights)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise DistillError(f"--start {folder}: is no draft: {CONFIG_FILE} or {WEIGHTS_FILE}: {error}") from error
    if config.tokenizer_fingerprint != loaded.tokenizer_fingerprint:
        raise DistillError(f"--start {folder}: is a draft of {config.target}, whose tokenizer is not this target's")
    return Start(weights, key, config, head_ids)


def read_openings(path: Path) -> list[str]:
    """Return the lines of a file of beginnings of questions; an empty line leaves the target free.

    Raises:
        DistillError: The file has no lines, or is no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DistillError(f"--openings {path}: {error}") from error
    if not any(line.strip() for line in lines):
        raise DistillError(f"--openings {path}: must have beginnings of questions, one a line")
    # What the target writes next brings its own space.
    return [line.rstrip() for line in lines]


def _head_ids(weights: Path) -> npt.NDArray[np.int64]:
    with safe_open(weights, framework="numpy") as file:
        ids: npt.NDArray[np.int64] = file.get_tensor("head_ids").astype(np.int64)
    return ids
