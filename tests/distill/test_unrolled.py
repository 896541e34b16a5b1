"""All steps at once are what a draft does one token after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from services.common.engine.draft_model import DraftConfig, DraftModel
from services.distill.unrolled import unroll
from tests.support.engines import load
from tests.support.models import ARCHITECTURES, make_tiny

COUNT, STEPS = 9, 4
CASES = [
    ("llama", (1,)),
    ("llama", (0, 1)),
    ("qwen2 with biases", (1,)),
    ("qwen3 with norms of q and k", (1,)),
    ("gpt2 with learned positions", (0, 1)),
    ("gpt-neox", (1,)),
    ("mixtral with experts", (1,)),
]


def make_draft(path: Path, name: str, layers: tuple[int, ...], features: tuple[int, ...]) -> DraftModel:
    loaded = load(make_tiny(path / "model", ARCHITECTURES[name]()))
    torch.manual_seed(4)
    draft = DraftModel(DraftConfig("target", "", layers, features, COUNT), loaded.model, torch.arange(100)).eval()
    for weight in draft.parameters():
        # The start as identity would hide a part that is left out.
        weight.data += 0.1 * torch.randn_like(weight)
    return draft


def drafted(
    draft: DraftModel, tokens: torch.Tensor, features: torch.Tensor, known: int, steps: int
) -> list[torch.Tensor]:
    """Return a after `known` tokens whose predecessors' states are known, then token by token with a growing cache."""
    cache: Any = DynamicCache(config=draft.body.config)
    assert draft.fuse is not None
    fused = draft.fuse(features)
    states = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, : known - 1]], dim=1)
    found = []
    at = torch.arange(known)
    for step in range(steps):
        out = draft.body(
            inputs_embeds=draft.embed(tokens[:, at], states), position_ids=at.unsqueeze(0), cache=cache, use_cache=True
        ).last_hidden_state
        found.append(out[:, -1])
        states, at = out[:, -1:], torch.tensor([known + step])
    return found


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers"), CASES)
def test_each_step_equals_drafting_token_by_token(tmp_path: Path, name: str, layers: tuple[int, ...]) -> None:
    draft = make_draft(tmp_path, name, layers, (1, 2))
    tokens = torch.tensor([[5, 80, 13, 44, 9, 200, 31, 7, 66], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    features = torch.randn(2, COUNT, 64, generator=torch.Generator().manual_seed(5))
    unrolled = list(unroll(draft, tokens, features, STEPS))
    assert [skip for skip, _ in unrolled] == [1, 2, 3, 4]
    for known in range(2, COUNT - STEPS + 2):
        for step, a in enumerate(drafted(draft, tokens, features, known, STEPS)):
            torch.testing.assert_close(unrolled[step][1][:, known - 1 + step], a, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_states_there_is_one_step_and_it_is_the_layers_own(tmp_path: Path) -> None:
    draft = make_draft(tmp_path, "llama", (0, 1), ())
    tokens = torch.tensor([[5, 80, 13, 44]])
    ((skip, a),) = unroll(draft, tokens, None, STEPS)
    assert skip == 0
    cache: Any = DynamicCache(config=draft.body.config)
    for at in range(4):
        embedded = draft.embed(tokens[:, at : at + 1])
        out = draft.body(inputs_embeds=embedded, position_ids=torch.tensor([[at]]), cache=cache, use_cache=True)
        torch.testing.assert_close(a[:, at : at + 1], out.last_hidden_state, rtol=1e-4, atol=1e-4)
