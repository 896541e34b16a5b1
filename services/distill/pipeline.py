"""From a target to its draft: write, compute states, train; each goes on where an earlier run stopped.

Read `distill` first.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from services.common.engine.admission import AdmissionLimits
from services.common.engine.draft_model import DraftModel
from services.common.engine.engine import Engine
from services.common.engine.model import LoadedModel
from services.common.engine.options import EngineOptions
from services.distill.chat import Turns, turns
from services.distill.corpus import Corpus
from services.distill.errors import DistillError
from services.distill.folder import Settings, begin, require_same
from services.distill.learning import learn
from services.distill.run import DistillOptions, Outcome, Progress, Run, load_target
from services.distill.start import Start, read_openings, read_start
from services.distill.states import check_target, needed_bytes, write_states
from services.distill.unrolled import unroll
from services.distill.writing import Shards, longest_turn, write

_WRITING, _STATES = 0.4, 0.6
"""Shares of a run's hours by which writing and states have to end; what they leave is training's."""
_DEFAULT_TOKENS = 1_000_000


def distill(options: DistillOptions, stop: Callable[[], bool], progress: Progress) -> Outcome:
    """Make a draft, or go on with one, for as many hours as the options say.

    Args:
        options: What is asked for.
        stop: Is asked every few seconds; once true, everything is saved and the run ends.
        progress: Is told how far it is.

    Raises:
        StartupError: A target that cannot be distilled, a folder that cannot be used, no room, no time.
    """
    run = Run(options, stop, progress)
    known = run.folder.read()
    progress.say(f"Loading {options.target}")
    loaded = load_target(options, known.dtype if known else "auto")
    settings, opening = _settings(run, known, loaded)
    corpus = Corpus(run.folder.data, settings.width)
    corpus.add_files(options.texts, loaded.vocab_size, settings.seed)
    shards = Shards(run.folder.texts, opening, settings.width)
    tokens = _tokens_to_write(options, corpus, shards)
    _require_room(run, settings, loaded, corpus, tokens)
    if sum(len(text.tokens) for text in shards.finished()) < tokens and not run.over(_WRITING):
        with run.spending(settings, "writing"):
            loaded = _write(run, settings, loaded, shards, tokens)
    corpus.add_written(shards.finished(), tokens)
    with run.spending(settings, "states"):
        _states(run, settings, loaded, corpus)
    if run.over():
        return Outcome(None, stop())
    return learn(run, settings, loaded, corpus, opening)


def _settings(run: Run, known: Settings | None, loaded: LoadedModel) -> tuple[Settings, Turns]:
    """Return the draft's settings and how its target's texts begin.

    New settings are written down once it is sure that there can be such a draft.
    """
    options = run.options
    asked: dict[str, Any] = {name: getattr(options, name) for name in ("kind", "layers", "head", "seed")}
    openings = read_openings(options.openings) if options.openings else None
    start = read_start(options.start, loaded) if options.start else None
    if known is not None:
        require_same(known, loaded, options.out, **asked, openings=openings, start=start.key if start else None)
        return known, _turns(known, loaded)
    check_target(loaded)
    settings = begin(loaded, **asked, width=options.width, openings=openings, start=start)
    opening = _turns(settings, loaded)
    _try(settings, loaded, start)
    try:
        if start is not None:
            run.folder.keep_start(start)
        run.folder.write(settings)
    except OSError as error:
        raise DistillError(f"--out {options.out}: {error.strerror}") from error
    return settings, opening


def _turns(settings: Settings, loaded: LoadedModel) -> Turns:
    return turns(loaded, settings.openings, longest_turn(settings.width))


def _try(settings: Settings, loaded: LoadedModel, start: Start | None) -> None:
    """Run the draft that is to be made once, untrained.

    Raises:
        DistillError: The target's layers cannot be taken out of it, or the weights to begin with are of other shapes.
    """
    try:
        ids = torch.arange(2) if start is None else torch.from_numpy(start.head_ids)
        draft = DraftModel(settings.config(), loaded.model, ids.to(loaded.device)).to(loaded.device)
        width = 0 if draft.fuse is None else draft.fuse.in_features
        features = torch.zeros(1, 4, width, dtype=loaded.model.dtype, device=loaded.device) if width else None
        with torch.no_grad():
            list(unroll(draft, torch.zeros(1, 4, dtype=torch.long, device=loaded.device), features, 2))
    # Each architecture that does not fit fails in a way of its own.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DistillError(
            f"{loaded.model_id} ({loaded.config.model_type}) cannot be distilled: no draft can be made of its layers: "
            f"{type(error).__name__}: {reason}"
        ) from error
    if start is not None:
        try:
            draft.load_state_dict(load_file(start.weights))
        except RuntimeError as error:
            raise DistillError(
                f"--start {start.weights.parent}: is a draft of {start.config.target}, whose layers have other shapes"
            ) from error


def _tokens_to_write(options: DistillOptions, corpus: Corpus, shards: Shards) -> int:
    """Return how many tokens the target shall have written in the end."""
    if options.tokens_to_write is not None:
        return options.tokens_to_write
    # Of a run before this one; else as much as a small draft can make use of.
    return _DEFAULT_TOKENS if shards.texts or not corpus.sources else 0


def _require_room(run: Run, settings: Settings, loaded: LoadedModel, corpus: Corpus, tokens: int) -> None:
    width = len(settings.feature_layers) * loaded.config.hidden_size
    known = sum(source.texts for source in corpus.sources if not source.key)
    written = int(corpus.lengths[len(corpus.lengths) - known :].sum()) if known else 0
    needed = needed_bytes(corpus.count + max(0, tokens - written), width)
    states = run.folder.data / "states.bin"
    # Blocks and not bytes: most of a file that is begun is holes.
    there = 512 * states.stat().st_blocks if states.exists() else 0
    run.folder.require_room(max(0, needed - there))


def _write(run: Run, settings: Settings, loaded: LoadedModel, shards: Shards, tokens: int) -> LoadedModel:
    """Let the target write; return it loaded anew, for the engine has changed the one that it was given."""
    minutes = 60 * run.options.hours
    run.progress.say(
        f"{minutes:.0f} minutes: at most {_WRITING * minutes:.0f} of writing, then the states, the rest is training"
    )
    began_s, before = time.monotonic(), sum(len(text.tokens) for text in shards.texts)
    last = [0.0]

    def report(count: int) -> None:
        last[0] = (count - before) / max(1e-9, time.monotonic() - began_s)
        share = max(run.elapsed / _WRITING, count / max(1, tokens))
        run.progress.update("writing", share, f"{count:,} tokens, {last[0]:.0f} tokens/s")

    passes = EngineOptions(admission=AdmissionLimits(run.options.batch, run.options.batch, 3600.0))

    async def writing() -> None:
        engine = Engine(loaded, passes)
        try:
            await write(
                engine,
                shards,
                tokens=tokens,
                seed=settings.seed,
                batch=run.options.batch,
                until=lambda: run.over(_WRITING),
                report=report,
            )
        finally:
            await engine.close()

    asyncio.run(writing())
    run.progress.say(f"Written: {len(shards.finished())} texts, {last[0]:.0f} tokens/s")
    gc.collect()
    return load_target(run.options, settings.dtype)


def _states(run: Run, settings: Settings, loaded: LoadedModel, corpus: Corpus) -> None:
    total = len(corpus.tokens)
    began_s = time.monotonic()
    first: list[int] = []

    def report(ready: int) -> None:
        first.append(ready)
        speed = int(corpus.lengths[first[0] : ready].sum()) / max(1e-9, time.monotonic() - began_s)
        share = max(run.elapsed / _STATES, ready / total)
        run.progress.update("states", share, f"{ready} of {total} texts, {speed:.0f} tokens/s")

    write_states(loaded, corpus, run.folder.data, settings.feature_layers, lambda: run.over(_STATES), report)
