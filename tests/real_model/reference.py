"""transformers' own `generate` in this process, in float32: what the service is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FLOAT_NOISE = 2e-5
"""How far apart two scores may be and still change places, as a fraction of the largest score.

Float32 scores of SmolLM2 (up to 39) computed token by token and all at once, on the same 64 tokens, were seen to differ
by up to 7e-5, which is 1.9e-6 of the largest; this is ten times that. Greedy answers to the prompts had gaps between
first and second of 1e-3 and more, so what is let through is float noise and hardly anything else.
"""


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference's.

    Attributes:
        position: Tokens that are equal before it.
        gap: Between the two tokens' scores, as a fraction of the largest score.
    """

    position: int
    gap: float


class Reference:
    """The target by itself."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._answers: dict[tuple[str, int], list[int]] = {}

    def chat(self, prompt: str) -> list[int]:
        """Return a prompt's tokens in the chat template."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        return ids

    def greedy(self, prompt: str, max_tokens: int) -> list[int]:
        """Return the answer of `generate` to a chat prompt; computed once."""
        if (prompt, max_tokens) not in self._answers:
            ids = torch.tensor([self.chat(prompt)])
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
            )
            self._answers[prompt, max_tokens] = output[0, ids.shape[1] :].tolist()
        return self._answers[prompt, max_tokens]

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the scores of the token after `ids`: float64[vocab]."""
        with torch.inference_mode():
            scores: torch.Tensor = self._model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
        return scores.double().numpy()

    def surprise(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Return the mean of -log p of an answer's tokens, in nats."""
        ids = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            scores = self._model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(scores, ids[0, len(prompt) :]))

    def compare(self, prompt: str, answer: Sequence[int], max_tokens: int) -> Difference | None:
        """Compare a greedy answer with `generate`'s, up to where they differ.

        After that the two texts are different ones, and there is nothing to compare.

        Raises:
            AssertionError: They differ by more than float noise can explain.
        """
        expected = self.greedy(prompt, max_tokens)
        if list(answer) == expected:
            return None
        at = next((i for i, pair in enumerate(zip(expected, answer, strict=False)) if pair[0] != pair[1]), None)
        assert at is not None, f"one answer ends within the other: {len(answer)} and {len(expected)} tokens"
        scores = self.logits([*self.chat(prompt), *expected[:at]])
        first_two = set(np.argsort(scores)[-2:].tolist())
        gap = abs(scores[expected[at]] - scores[answer[at]]) / np.abs(scores).max()
        assert {expected[at], answer[at]} == first_two, f"not the two likeliest at {at}, {gap:.1e} apart"
        assert gap <= FLOAT_NOISE, f"at {at} the answers differ by more than float noise: {gap:.1e}"
        return Difference(at, gap)
