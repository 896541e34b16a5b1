"""Trains a draft on the target's own distributions; whatever it is doing can be stopped and gone on with."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.engine.draft_model import DraftModel
from services.distill.data import Batch, TeacherData
from services.distill.loss import DraftLoss, teacher
from services.distill.unrolled import unroll


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a draft is trained.

    Attributes:
        steps: Drafting steps unrolled; a draft without features has one.
        texts: In a batch.
        held_out: Texts, the first ones, that are measured on and never trained on.
        learning_rate: Of the matrices (Muon, scaled as AdamW would be); norms learn at a tenth of it.
        variation: Weight of the total variation beside KL(p || q).
        later: Share of the positions whose loss is taken in steps after the first.
        average: Of the weights that are measured and saved: each update moves them by 1 - average.
        warm_up: Updates until the learning rate is there.
        seed: Of the order of the texts, and of the positions that later steps learn from.
        skip_tokens: The same at the beginning of all texts, so that there is nothing to learn.
        bridge: Tokens that stand before an answer. What is served is answers, so only they are learnt from and
            measured on; a text without the bridge is learnt from whole.
        bfloat16: Compute in it, the weights stay float32; for devices that are good at it.
    """

    steps: int = 3
    texts: int = 8
    held_out: int = 64
    learning_rate: float = 2e-3
    variation: float = 1.0
    later: float = 0.5
    average: float = 0.99
    warm_up: int = 50
    seed: int = 0
    skip_tokens: int = 24
    bridge: tuple[int, ...] = ()
    bfloat16: bool = True


@dataclass(frozen=True, slots=True)
class Score:
    """What a draft is worth on held-out texts, by step.

    Attributes:
        alphas: Mean over positions of the sum over tokens of min(p, q), at temperature 1.
        agreements: How often the likeliest tokens are the same.
    """

    alphas: tuple[float, ...]
    agreements: tuple[float, ...]


class Trainer:
    """A draft, its optimiser's state, and how far it has come.

    Attributes:
        model: The draft that learns, float32.
        average: Its average over the last updates, which is what is measured and saved.
        updates: Batches learnt from.
        tokens: Positions learnt from.
        seconds: Spent.
    """

    def __init__(self, model: DraftModel, data: TeacherData, options: TrainingOptions) -> None:
        self.model = model
        self.average = copy.deepcopy(model)
        self.options = options
        self.updates = 0
        self.tokens = 0
        self.seconds = 0.0
        self._data = data
        self._device = model.head.device
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2]
        others = [p for p in trained if p.ndim != 2]
        rate = options.learning_rate
        muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, lr=rate / 10, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimisers: list[torch.optim.Optimizer] = [muon, adam]

    def run(
        self, until: Callable[[], bool], report: Callable[[float], None], pace: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Learn batch after batch.

        Args:
            until: Once true, no batch follows.
            report: Gets each batch's loss.
            pace: What the learning rate is multiplied by.
        """
        options = self.options
        order = self._data.shuffled(options.held_out, options.texts, options.seed, self.updates)
        for rows in order:
            if until():
                return
            started_s = time.perf_counter()
            batch = self._data.batch(rows).to(self._device)
            paced = options.learning_rate * min(1.0, (self.updates + 1) / options.warm_up) * pace()
            for optimiser, rate in zip(self._optimisers, (1.0, 0.1), strict=True):
                for group in optimiser.param_groups:
                    group["lr"] = paced * rate
            loss = self._learn(batch)
            self.updates += 1
            self.tokens += int(batch.lengths.sum())
            self.seconds += time.perf_counter() - started_s
            report(loss)

    def _learn(self, batch: Batch) -> float:
        options = self.options
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.updates)
        total = torch.zeros((), device=self._device)
        with self._precision():
            p, at = self._targets(batch)
            for skip, states in unroll(self.model, batch.tokens, self._features(batch), options.steps):
                step_at, step_p = at[at[:, 1] >= skip], p[at[:, 1] >= skip]
                if skip > 1:
                    some = (torch.rand(len(step_at), generator=generator) < options.later).to(self._device)
                    step_at, step_p = step_at[some], step_p[some]
                if not len(step_at):
                    continue
                logits = states[step_at[:, 0], step_at[:, 1]] @ self.model.head.T
                loss: Any = DraftLoss.apply(  # type: ignore[no-untyped-call]
                    logits, step_p, options.variation
                )
                total = total + loss
        for optimiser in self._optimisers:
            optimiser.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        decay = min(self.options.average, self.updates / (self.updates + 10))
        with torch.no_grad():
            for mean, value in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)
        return float(total.detach()) / options.steps

    def _features(self, batch: Batch) -> torch.Tensor | None:
        if self.model.fuse is None:
            return None
        return batch.features[..., -self.model.fuse.in_features :].to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.options.bfloat16 else torch.float32

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.options.bfloat16)

    def _targets(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return p at the positions to learn from, and which those are: int64[n, 2], text and position."""
        width = batch.tokens.shape[1]
        positions = torch.arange(width, device=self._device)
        # The header of the user turn is the same in all texts.
        first = answer_starts(batch.tokens, self.options.bridge).clamp(min=self.options.skip_tokens)
        # The token before an answer is where its first one is predicted.
        wanted = (positions >= first.unsqueeze(1) - 1) & (positions < batch.lengths.unsqueeze(1))
        at = wanted.nonzero()
        hidden = batch.features[..., -self.model.head.shape[1] :][at[:, 0], at[:, 1]].to(self._dtype)
        with torch.no_grad():
            p = teacher(hidden, self.model.head.to(self._dtype), batch.log_totals[at[:, 0], at[:, 1]])
        return p, at

    @torch.no_grad()
    def measure(self, steps: int = 5, texts: int | None = None) -> Score:
        """Return what the average is worth on the held-out texts."""
        alphas, agreements, counts = np.zeros(steps), np.zeros(steps), np.zeros(steps)
        total = min(texts or self.options.held_out, self.options.held_out)
        for first in range(0, total, 8):
            batch = self._data.batch(np.arange(first, min(first + 8, total))).to(self._device)
            with self._precision():
                p, at = self._targets(batch)
                for step, (skip, states) in enumerate(unroll(self.average, batch.tokens, self._features(batch), steps)):
                    far = at[:, 1] >= skip
                    q = torch.softmax((states[at[far, 0], at[far, 1]] @ self.average.head.T).float(), dim=-1)
                    alphas[step] += float(torch.minimum(p[far], q).sum())
                    agreements[step] += float((p[far].argmax(-1) == q.argmax(-1)).sum())
                    counts[step] += int(far.sum())
        known = counts > 0
        return Score(tuple(alphas[known] / counts[known]), tuple(agreements[known] / counts[known]))

    def save(self, path: Path) -> None:
        """Write everything that is needed to go on, as a whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "updates": self.updates,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(path, weights_only=True, map_location=self._device)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.updates, self.tokens, self.seconds = state["updates"], state["tokens"], state["seconds"]


def answer_starts(tokens: torch.Tensor, bridge: tuple[int, ...]) -> torch.Tensor:
    """Return where each text's first answer begins, 0 where it has none: int64[texts].

    Args:
        tokens: int64[texts, positions].
        bridge: What stands before an answer.
    """
    count, width = tokens.shape
    if not 0 < len(bridge) < width:
        return tokens.new_zeros(count)
    found = (tokens.unfold(1, len(bridge), 1) == tokens.new_tensor(bridge)).all(dim=-1)
    return torch.where(found.any(dim=1), found.int().argmax(dim=1) + len(bridge), 0)
