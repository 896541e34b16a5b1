"""A target's texts and states in files, small enough that training takes seconds."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from services.common.engine.draft_model import DraftConfig, DraftModel
from services.common.engine.model import LoadedModel
from services.distill.corpus import Corpus
from services.distill.data import TeacherData
from services.distill.states import write_states
from services.distill.training import Trainer, TrainingOptions

FEATURES = (1, 2, 3)
HEAD = 300
WIDTH = 24


def texts(path: Path, count: int, seed: int = 0) -> Path:
    """Write random token ids: what a text says does not matter, only what the target makes of it."""
    source = random.Random(seed)
    np.save(path, np.array([[source.randrange(2, 40) for _ in range(WIDTH)] for _ in range(count)], np.uint16))
    return path


def corpus_of(folder: Path, count: int) -> Corpus:
    corpus = Corpus(folder, WIDTH)
    corpus.add_files([texts(folder / "texts.npy", count)], 320, 0)
    return corpus


def draft_of(target: LoadedModel, features: tuple[int, ...] = FEATURES, layers: tuple[int, ...] = (2,)) -> DraftModel:
    torch.manual_seed(0)
    return DraftModel(DraftConfig("target", "", layers, features, WIDTH), target.model, torch.arange(HEAD))


def trainer_of(target: LoadedModel, folder: Path, count: int = 40, features: tuple[int, ...] = FEATURES) -> Trainer:
    """Return a trainer in float32 whose texts and states are in `folder`."""
    folder.mkdir(exist_ok=True)
    corpus = corpus_of(folder, count)
    write_states(target, corpus, folder, FEATURES, lambda: False, lambda _: None)
    options = TrainingOptions(
        steps=3 if features else 1, held_out=8, skip_tokens=1, bfloat16=False, warm_up=5, learning_rate=2e-2
    )
    return Trainer(draft_of(target, features), TeacherData(folder, 32 * len(FEATURES)), options)
