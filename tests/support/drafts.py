"""Small drafts, untrained, in the form in which trained ones are saved, and what training would compute of them.

make_tiny_draft(tmp_path / "draft", target_folder, feature_layers=(1, 2))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.common.engine.draft_model import DraftConfig, DraftModel
from services.common.engine.model import LoadedModel
from services.distill.unrolled import unroll
from tests.support.engines import load


def make_tiny_draft(
    path: Path,
    target: Path,
    *,
    layers: Sequence[int] = (0,),
    feature_layers: Sequence[int] = (1, 2),
    window: int = 48,
    head: Sequence[int] = range(1, 320, 2),
    noise: float = 0.2,
) -> Path:
    """Save an untrained draft for a target in `path`; return it.

    Args:
        path: Made if it is not there.
        target: The target's folder.
        layers: Of the target's, that it begins as.
        feature_layers: Whose output it is fed with; none makes a draft of tokens alone.
        window: Positions that it looks back on.
        head: Tokens that it proposes.
        noise: Added to its weights, as training would have changed them.
    """
    loaded = load(target)
    config = DraftConfig(str(target), loaded.tokenizer_fingerprint, tuple(layers), tuple(feature_layers), window)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        draft = DraftModel(config, loaded.model, torch.tensor(list(head)))
        with torch.no_grad():
            for weight in draft.parameters():
                weight += noise * torch.randn_like(weight) * weight.std().nan_to_num(1.0).clamp(min=0.05)
        draft.save(path)
    return path


class Trained:
    """A draft and its target as training sees them: the whole text in one forward."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._target: LoadedModel = load(target)
        self.model = DraftModel.load(folder, self._target.model).eval()
        self.head_ids = self.model.head_ids.tolist()

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the target's states, bfloat16[positions, width]."""
        base: Any = self._target.model.base_model
        out = base(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        count = self._target.config.num_hidden_layers
        parts = [
            out.last_hidden_state if layer == count else out.hidden_states[layer]
            for layer in self.model.config.feature_layers
        ]
        return torch.cat(parts, dim=-1)[0].to(torch.bfloat16)

    @torch.inference_mode()
    def q(self, tokens: Sequence[int], known: int, steps: int) -> list[torch.Tensor]:
        """Return q after each of tokens[: known], .., tokens[: known + steps - 1], softmax over the head.

        The first from the target's states, the others from the draft's own, as a round with `known` committed tokens.
        """
        features = self.features(tokens).float().unsqueeze(0)
        ids = torch.tensor([list(tokens)])
        return [
            torch.softmax(states[0, known - 1 + step] @ self.model.head.T, dim=-1)
            for step, (_, states) in enumerate(unroll(self.model, ids, features, steps))
        ]


def feature_bytes(features: torch.Tensor) -> bytes:
    """Return features as they are sent."""
    return features.contiguous().view(torch.int16).numpy().tobytes()
