"""One run of `paceline distill`: what is asked for, how much time there is, and whom it tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import DtypeName, LoadedModel, LoadOptions, load_model
from services.distill.folder import Folder, Kind, Settings
from services.distill.training import Score


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """What is asked for; None takes the default, or what the folder was begun with.

    Attributes:
        target: Folder, hub id, GGUF file, or "default".
        out: The draft's folder.
        hours: Of this run, all phases.
        kind: Whether the draft is fed with the target's states.
        layers: How many.
        head: Tokens that it can propose.
        texts: Files of token ids that the target wrote.
        openings: A file of beginnings of questions, one a line; the target goes on from them.
        start: A draft of this target to begin with, in place of the target's own layers.
        seed: Of everything.
        threads: Of torch.
        tokens_to_write: The target writes so many in all; none where `texts` are given.
        device: Of torch.
        width: Most tokens of a text, and how far the draft is trained to look back.
        batch: Texts that are written at a time.
    """

    target: str
    out: Path
    hours: float = 1.0
    kind: Kind | None = None
    layers: int | None = None
    head: int | None = None
    texts: tuple[Path, ...] = ()
    openings: Path | None = None
    start: Path | None = None
    seed: int | None = None
    threads: int | None = None
    tokens_to_write: int | None = None
    device: str = "auto"
    width: int = 352
    batch: int = 32


class Progress(Protocol):
    """What is told of a run."""

    def say(self, words: str) -> None:
        """Tell something that stays."""

    def update(self, phase: str, share: float, words: str) -> None:
        """Tell how far a phase is, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        score: On the held-out texts; None where training did not begin.
        stopped: It was told to stop before its hours were over.
    """

    score: Score | None
    stopped: bool


class Run:
    """One run: its options, its clock, and whom it tells."""

    def __init__(self, options: DistillOptions, stop: Callable[[], bool], progress: Progress) -> None:
        self.options = options
        self.folder = Folder(options.out)
        self.progress = progress
        self.stop = stop
        self._started_s = time.monotonic()

    def over(self, share: float = 1.0) -> bool:
        """Tell whether this share of the hours is over, or the run is to stop."""
        return self.stop() or self.elapsed >= share

    @property
    def elapsed(self) -> float:
        """Share of the hours that is over."""
        return (time.monotonic() - self._started_s) / (3600 * self.options.hours)

    @contextmanager
    def spending(self, settings: Settings, phase: str) -> Iterator[None]:
        """Add what the block takes to a phase's seconds."""
        began_s, before_s = time.monotonic(), settings.spent_s.get(phase, 0.0)
        try:
            yield
        finally:
            settings.spent_s[phase] = before_s + time.monotonic() - began_s
            self.folder.write(settings)


def load_target(options: DistillOptions, dtype: DtypeName) -> LoadedModel:
    """Load the target.

    Raises:
        StartupError: It cannot be had, or not be served.
    """
    return load_model(LoadOptions(str(_path(options.target)), dtype, options.device, threads=options.threads))


def target_folder(options: DistillOptions) -> Path | None:
    """Return the folder of the target's files, None for one from a hub."""
    path = Path(_path(options.target)).expanduser()
    return path if path.is_dir() else None


def _path(model: str) -> str:
    return str(ensure_default_model(paceline_home(), lambda _: None)) if model == "default" else model
