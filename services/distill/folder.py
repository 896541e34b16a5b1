"""The folder of a draft: what it was begun with, so that later runs go on with it and never mix two drafts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from services.common.engine.draft_model import CONFIG_FILE, DraftConfig, default_feature_layers
from services.common.engine.model import DtypeName, LoadedModel
from services.distill.errors import DistillError
from services.distill.start import Start

Kind = Literal["hidden", "tokens"]


@dataclass(slots=True)
class Settings:
    """What a draft was begun with, in work/settings.json.

    Attributes:
        target: Name of the target.
        weights_hash: Of the target, in `dtype`.
        tokenizer_fingerprint: Of the target.
        dtype: That the target writes in, and computes its states in.
        kind: "hidden" is fed with the target's states, "tokens" is not.
        layers: Which of the target's layers the draft begins as.
        feature_layers: After how many of the target's layers the states are taken.
        head: Tokens that the draft can propose.
        seed: Of everything.
        width: Most tokens of a text.
        openings: Beginnings of questions that the target goes on from.
        start: SHA-256 of the draft that it was begun from; empty where that were the target's own layers.
        held_out: Texts that are measured on, never trained on; None until training begins.
        spent_s: Seconds by phase, over all runs.
    """

    target: str
    weights_hash: str
    tokenizer_fingerprint: str
    dtype: DtypeName
    kind: Kind
    layers: list[int]
    feature_layers: list[int]
    head: int
    seed: int
    width: int
    openings: list[str] = dataclasses.field(default_factory=list)
    start: str = ""
    held_out: int | None = None
    spent_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def hours(self) -> float:
        """Hours spent in all."""
        return sum(self.spent_s.values()) / 3600

    def config(self) -> DraftConfig:
        """Return the draft's own configuration."""
        features = tuple(self.feature_layers) if self.kind == "hidden" else ()
        return DraftConfig(self.target, self.tokenizer_fingerprint, tuple(self.layers), features, self.width)


class Folder:
    """Where everything of a draft is.

    Attributes:
        out: The draft itself, its card and its log.
        work: What more hours go on from.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.work = out / "work"
        self.texts = self.work / "texts"
        self.data = self.work / "data"
        self.checkpoint = self.work / "checkpoint.pt"
        self.start = self.work / "start.safetensors"
        self.head_ids = self.work / "head_ids.npy"
        self.log = out / "log.jsonl"

    def read(self) -> Settings | None:
        """Return what the draft here was begun with; None in a folder that is new.

        Raises:
            DistillError: The folder has other things in it, or a draft that was made elsewhere.
        """
        path = self.work / "settings.json"
        if path.exists():
            return Settings(**json.loads(path.read_text()))
        if (self.out / CONFIG_FILE).exists():
            raise DistillError(
                f"--out {self.out}: has a draft for {DraftConfig.read(self.out).target} but not its work"
            )
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise DistillError(f"--out {self.out}: must be a new or empty folder, or one that `distill` has begun")
        return None

    def write(self, settings: Settings) -> None:
        """Write what the draft was begun with, as a whole or not at all."""
        self.work.mkdir(parents=True, exist_ok=True)
        partial = self.work / "settings.partial"
        partial.write_text(json.dumps(dataclasses.asdict(settings), indent=2) + "\n")
        partial.replace(self.work / "settings.json")

    def keep_start(self, start: Start) -> None:
        """Keep the weights that a new draft begins with: where they came from may change."""
        self.work.mkdir(parents=True, exist_ok=True)
        np.save(self.head_ids, start.head_ids)
        shutil.copyfile(start.weights, self.start)

    def require_room(self, needed: int) -> None:
        """Find out whether there is room on the disk.

        Raises:
            DistillError: There is not.
        """
        place = next(folder for folder in (self.out, *self.out.resolve().parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise DistillError(
                f"--out {self.out}: {free / 1e9:.1f} GB are free and the target's states will take {needed / 1e9:.1f}: "
                "make room, or let it write less (--tokens-to-write)"
            )


def begin(
    loaded: LoadedModel,
    *,
    kind: Kind | None,
    layers: int | None,
    head: int | None,
    seed: int | None,
    width: int,
    openings: list[str] | None = None,
    start: Start | None = None,
) -> Settings:
    """Return the settings of a new draft; None takes the default, or what the draft that it begins as has.

    Raises:
        DistillError: More layers or tokens than the target has, others than the draft that it begins as.
    """
    total = loaded.config.num_hidden_layers
    if start is not None:
        kind, layers, head = _as_started(start, kind=kind, layers=layers, head=head)
    kind = kind or "hidden"
    if layers is not None and layers > total:
        raise DistillError(f"--layers is {layers}: must be at most {total}, the target's")
    if head is not None and head > loaded.vocab_size:
        raise DistillError(f"--head is {head}: must be at most {loaded.vocab_size}, the target's vocabulary")
    width = min(width, loaded.context_length or width)
    chosen = _layers(total, min(total, layers or (1 if kind == "hidden" else 2)), kind)
    window = getattr(loaded.config, "sliding_window", None)
    if window and window < width:
        raise DistillError(
            f"{loaded.model_id} ({loaded.config.model_type}) cannot be distilled: its layers look back on {window} "
            f"tokens, must be {width} or more"
        )
    feature_layers = list(default_feature_layers(total)) if kind == "hidden" else [total]
    if start is not None:
        chosen, feature_layers = list(start.config.layers), list(start.config.feature_layers) or feature_layers
    return Settings(
        target=loaded.model_id,
        weights_hash=loaded.weights_hash,
        tokenizer_fingerprint=loaded.tokenizer_fingerprint,
        dtype=cast("DtypeName", loaded.dtype),
        kind=kind,
        layers=chosen,
        feature_layers=feature_layers,
        head=head or min(8192, loaded.vocab_size),
        seed=seed or 0,
        width=width,
        openings=openings or [],
        start=start.key if start else "",
    )


def require_same(settings: Settings, loaded: LoadedModel, out: Path, **asked: Any) -> None:
    """Find out whether a run may go on with the draft that is there.

    Args:
        settings: Of the draft.
        loaded: The target of this run.
        out: Its folder.
        asked: Options by name; None was not given.

    Raises:
        DistillError: It is another target's, or an option asks for another draft.
    """
    if (settings.weights_hash, settings.tokenizer_fingerprint) != (loaded.weights_hash, loaded.tokenizer_fingerprint):
        raise DistillError(f"--out {out}: has the draft of another target, {settings.target}: take another folder")
    known = {"kind": settings.kind, "layers": len(settings.layers), "head": settings.head, "seed": settings.seed}
    for name in ("openings", "start"):
        if asked.pop(name, None) not in (None, getattr(settings, name)):
            raise DistillError(
                f"--{name}: is not what {out} was begun with (need not be said again): "
                "for another draft take another folder"
            )
    for name, value in asked.items():
        if value is not None and value != known[name]:
            raise DistillError(
                f"--{name} is {value}: must be {known[name]}, as {out} was begun with: "
                "for another draft take another folder"
            )


def _as_started(start: Start, **asked: Any) -> tuple[Kind, int, int]:
    """Return the kind, layers and head of the draft that a new one begins as: other ones have no such weights."""
    kind: Kind = "hidden" if start.config.feature_layers else "tokens"
    known = {"kind": kind, "layers": len(start.config.layers), "head": len(start.head_ids)}
    for name, value in asked.items():
        if value is not None and value != known[name]:
            raise DistillError(f"--{name} is {value}: must be {known[name]}, as the draft of --start has")
    return kind, len(start.config.layers), len(start.head_ids)


def _layers(total: int, count: int, kind: Kind) -> list[int]:
    """Return which layers to begin as: the last ones after the target's states, else some from first to last."""
    if kind == "hidden":
        return list(range(total - count, total))
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]
