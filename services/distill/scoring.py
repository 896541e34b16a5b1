"""What a draft is worth on given questions: alpha by step, on answers that the target writes itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from services.common.engine.draft_model import DraftModel
from services.common.engine.engine import Engine
from services.common.engine.model import LoadedModel
from services.common.engine.processors import distributions
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import SamplingParams
from services.distill.states import states
from services.distill.unrolled import unroll

MODES = {"greedy": SamplingParams(temperature=0.0), "temperature 1": SamplingParams(temperature=1.0)}


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and what the target answered.

    Attributes:
        tokens: Of both.
        begins: Where the answer begins.
    """

    tokens: tuple[int, ...]
    begins: int


@dataclass(slots=True)
class Worth:
    """Sums over the positions of some answers.

    Attributes:
        kept: float64[steps], the chance that a draft of that step is kept, added up.
        counts: float64[steps], positions.
        truncated: By k, the same as `kept` where q is cut to its k likeliest tokens.
    """

    kept: npt.NDArray[np.float64]
    counts: npt.NDArray[np.float64]
    truncated: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    @property
    def alphas(self) -> list[float]:
        """Alpha by step."""
        return [float(value) for value in self.kept / np.maximum(self.counts, 1)]

    def alphas_at(self, top_k: int) -> list[float]:
        """Alpha by step where q is cut to its `top_k` likeliest tokens."""
        return [float(value) for value in self.truncated[top_k] / np.maximum(self.counts, 1)]

    def add(self, other: Worth) -> None:
        """Add the positions of other answers."""
        self.kept = self.kept + other.kept
        self.counts = self.counts + other.counts
        for top_k, kept in other.truncated.items():
            self.truncated[top_k] = self.truncated.get(top_k, np.zeros_like(kept)) + kept


async def answers(
    engine: Engine,
    questions: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    tokens: int,
    ends: Sequence[int],
    seed: int,
    batch: int = 8,
    report: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Let the target answer: at most `tokens` tokens each, what they say is a function of the seed alone."""
    free = asyncio.Semaphore(batch)

    async def one(index: int, question: Sequence[int]) -> Answer:
        told = list(question)

        def draw(logits: torch.Tensor) -> tuple[int, int | None]:
            (row,) = distributions(logits, params)
            token = sample(row, uniform(seed, index, len(told), Purpose.REPLACE))
            told.append(token)
            return token, None if token in ends else token

        async with free:
            session = await engine.open(len(question) + tokens)
            try:
                async with contextlib.aclosing(session.generate(0, list(question), tokens, draw)) as drawing:
                    async for _ in drawing:
                        pass
            finally:
                session.close()
        report()
        return Answer(tuple(told), len(question))

    return list(await asyncio.gather(*(one(index, question) for index, question in enumerate(questions))))


@torch.no_grad()
def worth(
    loaded: LoadedModel, draft: DraftModel, answer: Answer, *, greedy: bool, steps: int, top_ks: Sequence[int]
) -> Worth:
    """Return what the draft is worth at each position of an answer where a step of that number could be.

    At temperature 1 that is the sum of min(p, q); greedy, whether the draft's likeliest token is the target's.

    Args:
        loaded: The target, as transformers runs it.
        draft: The draft.
        answer: What the target wrote.
        greedy: How it was written, and how both would choose.
        steps: Of a round.
        top_ks: Cuts of q to look at too, where it is sampled.
    """
    tokens = torch.tensor([answer.tokens], device=loaded.device)
    feature_layers = draft.config.feature_layers or (loaded.config.num_hidden_layers,)
    features, log_totals = (part.to(loaded.device) for part in states(loaded, tokens, feature_layers))
    # The draft looks back on a window, and its positions are counted from there.
    first = max(0, len(answer.tokens) - draft.config.window)
    fed = features[:, first:].to(loaded.model.dtype) if draft.config.feature_layers else None
    last = features[0, :, -draft.head.shape[1] :]
    whole = loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = Worth(np.zeros(steps), np.zeros(steps), {} if greedy else {top_k: np.zeros(steps) for top_k in top_ks})
    for step, (skip, out) in enumerate(unroll(draft, tokens[:, first:], fed, steps)):
        # The round of this step began after the question at the earliest.
        at = torch.arange(max(first + skip, answer.begins - 1 + step), len(answer.tokens) - 1, device=loaded.device)
        scores = (out[0, at - first] @ draft.head.T).float()
        found.counts[step] += len(at)
        if greedy:
            theirs = whole(last[at])[:, : loaded.vocab_size].argmax(-1)
            found.kept[step] += float((draft.head_ids[scores.argmax(-1)] == theirs).sum())
            continue
        p = ((last[at] @ draft.head.T).float() - log_totals[0, at].unsqueeze(-1)).exp()
        q = torch.softmax(scores, dim=-1)
        found.kept[step] += float(torch.minimum(p, q).sum())
        for top_k in top_ks:
            kept = torch.topk(q, min(top_k, q.shape[1]), dim=-1)
            cut = kept.values / kept.values.sum(dim=-1, keepdim=True)
            found.truncated[top_k][step] += float(torch.minimum(p.gather(1, kept.indices), cut).sum())
    if not draft.config.feature_layers:
        # Without states of its own a draft sees the same at each step.
        found.kept[1:], found.counts[1:] = found.kept[0], found.counts[0]
        for values in found.truncated.values():
            values[1:] = values[0]
    return found
