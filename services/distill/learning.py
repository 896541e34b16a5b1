"""The last phase of a run: train until the hours are over, measuring and saving as it goes."""

from __future__ import annotations

import json
import time

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from services.common.engine.draft_model import CONFIG_FILE, WEIGHTS_FILE, DraftModel
from services.common.engine.model import LoadedModel
from services.distill.card import licence, write_card
from services.distill.chat import Turns
from services.distill.corpus import Corpus, coverage, head_ids
from services.distill.data import TeacherData
from services.distill.errors import DistillError
from services.distill.folder import Folder, Settings
from services.distill.run import Outcome, Run, load_target, target_folder
from services.distill.states import ready_texts
from services.distill.training import Score, Trainer, TrainingOptions

_HELD_OUT = 64
_COOLING = 0.3
"""Of the time of training: the share in which the learning rate falls."""
_MEASURE_SHARE = 0.05
"""Of the time of training; a measurement while it goes on is over half of the held-out texts."""


def learn(run: Run, settings: Settings, loaded: LoadedModel, corpus: Corpus, turns: Turns) -> Outcome:
    """Train until the run is over, then write the draft and its card.

    Raises:
        DistillError: There are not enough texts yet.
    """
    folder = run.folder
    options = _options(run, settings, loaded, corpus, turns)
    data = TeacherData(folder.data, len(settings.feature_layers) * loaded.config.hidden_size)
    ids = _head(folder, settings, corpus, loaded.vocab_size, turns.special)
    covered = coverage(corpus.counts(loaded.vocab_size, 0, settings.held_out), ids)
    run.progress.say(f"The head's {len(ids)} tokens are {covered:.1%} of the held-out texts")
    whole = load_target(run.options, "float32")
    torch.manual_seed(settings.seed)
    model = DraftModel(settings.config(), whole.model, torch.from_numpy(ids).to(whole.device)).to(whole.device)
    if folder.start.exists():
        model.load_state_dict(load_file(folder.start))
    # All of the target but its embeddings, which the draft holds, can go.
    del whole
    trainer = Trainer(model, data, options)
    if folder.checkpoint.exists():
        trainer.restore(folder.checkpoint)
    with run.spending(settings, "training"):
        score = _train(run, settings, trainer)
    told = licence(target_folder(run.options), settings.target)
    write_card(folder, settings, corpus, score, covered, told, trainer.updates)
    return Outcome(score, run.stop())


def _train(run: Run, settings: Settings, trainer: Trainer) -> Score:
    losses: list[float] = []
    measured_s, cost_s = time.monotonic(), 0.0
    began_s, before_h = time.monotonic(), settings.hours
    score: Score | None = None

    def note(texts: int | None) -> None:
        nonlocal measured_s, cost_s, score
        started_s = time.monotonic()
        score = trainer.measure(texts=texts)
        _save(run.folder, trainer)
        measured_s = time.monotonic()
        cost_s = measured_s - started_s
        _log(run.folder, trainer, score, losses, before_h + (measured_s - began_s) / 3600)
        losses.clear()

    def report(loss: float) -> None:
        losses.append(loss)
        if time.monotonic() - measured_s > cost_s / _MEASURE_SHARE:
            note(trainer.options.held_out // 2 or 1)
        speed = trainer.tokens / max(1e-9, trainer.seconds)
        alphas = " ".join(f"{alpha:.3f}" for alpha in score.alphas) if score else "not measured yet"
        words = f"update {trainer.updates}, loss {np.mean(losses or [loss]):.3f}, {speed:.0f} tokens/s, alpha {alphas}"
        run.progress.update("training", run.elapsed, words)

    began = run.elapsed
    trainer.run(run.over, report, lambda: _pace(run.elapsed, began))
    note(None)
    assert score is not None
    return score


def _pace(elapsed: float, began: float) -> float:
    """Return what the learning rate is multiplied by: it falls to 0 towards the end of each run.

    What learning at the full rate shakes up comes to rest then. A run that goes on begins at the full rate again (the
    warm-up, stable, decay of Hu et al. 2024, arXiv 2404.06395).

    Args:
        elapsed: Share of the run's hours.
        began: The same, where training began.
    """
    return min(1.0, max(0.0, 1.0 - elapsed) / (_COOLING * max(1e-9, 1.0 - began)))


def _options(run: Run, settings: Settings, loaded: LoadedModel, corpus: Corpus, turns: Turns) -> TrainingOptions:
    """Return how to train, and settle which texts are held out."""
    ready = ready_texts(run.folder.data)
    held_out = settings.held_out or max(1, min(_HELD_OUT, ready // 8))
    options = TrainingOptions(
        steps=3 if settings.kind == "hidden" else 1,
        held_out=held_out,
        seed=settings.seed,
        skip_tokens=max(1, corpus.common_opening()),
        bridge=turns.bridge,
        bfloat16=loaded.dtype == "bfloat16",
    )
    if ready < options.held_out + options.texts:
        raise DistillError(
            f"only {ready} texts with states came of the time so far: {options.held_out + options.texts} are needed. "
            "They are kept: run it again, with more --hours"
        )
    settings.held_out = held_out
    run.folder.write(settings)
    return options


def _head(
    folder: Folder, settings: Settings, corpus: Corpus, vocab_size: int, special: frozenset[int]
) -> npt.NDArray[np.int64]:
    """Return the head's tokens, settled when training begins: a checkpoint fits no other ones."""
    if not folder.head_ids.exists():
        ids = head_ids(corpus.counts(vocab_size, settings.held_out or 0), settings.head, sorted(special))
        np.save(folder.head_ids, ids)
    saved: npt.NDArray[np.int64] = np.load(folder.head_ids)
    return saved


def _save(folder: Folder, trainer: Trainer) -> None:
    """Write checkpoint and draft; whoever loads the draft meanwhile gets the old weights or the new ones."""
    trainer.save(folder.checkpoint)
    fresh = folder.work / "draft"
    trainer.average.save(fresh)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        (fresh / name).replace(folder.out / name)


def _log(folder: Folder, trainer: Trainer, score: Score, losses: list[float], hours: float) -> None:
    line = {
        "updates": trainer.updates,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "hours": hours,
        "wall": time.time(),
        "alphas": score.alphas,
        "agreements": score.agreements,
        "loss": float(np.mean(losses)) if losses else None,
    }
    with folder.log.open("a") as file:
        file.write(json.dumps(line) + "\n")
