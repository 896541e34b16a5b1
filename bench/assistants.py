"""Drafts that transformers' own assisted generation can use: generate(assistant_model=...)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from services.common.engine.draft_model import DraftConfig, DraftModel
from services.common.engine.model import LoadedModel


class ReducedHead(nn.Module):
    """The target's head, the rows of a draft's own vocabulary; every other token has the logit -inf, so q is 0."""

    weight: torch.Tensor
    ids: torch.Tensor

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("ids", ids)
        self._vocab_size = vocab_size

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of states [..., hidden]."""
        logits = states.new_full((*states.shape[:-1], self._vocab_size), float("-inf"))
        logits[..., self.ids] = nn.functional.linear(states, self.weight)
        return logits


def assistant(choice: str, draft: Path | None, loaded: LoadedModel, tokens: int | None) -> tuple[str, dict[str, Any]]:
    """Return what the assistant is, in words, and the arguments of generate that use it.

    Args:
        choice: A folder of a draft, or `early-exit:LAYERS`: the target's own first layers, with its norm and head.
            Empty: the draft that is measured where transformers can run it, else the first quarter of the target.
        draft: The draft that is measured.
        loaded: The target.
        tokens: Of a round; None leaves transformers' own choice.

    Raises:
        click.ClickException: There is none, or transformers cannot run it.
    """
    if not choice and draft is not None and DraftConfig.read(draft).feature_layers:
        choice = f"early-exit:{max(1, loaded.config.num_hidden_layers // 4)}"
    if choice.startswith("early-exit:"):
        return choice, _early_exit(choice, loaded, tokens)
    folder = Path(choice) if choice else draft
    if folder is None:
        raise click.ClickException("--assistant is needed: a folder of a draft, or early-exit:LAYERS")
    if DraftConfig.read(folder).feature_layers:
        raise click.ClickException(
            f"{folder.name} reads the target's hidden states, which generate(assistant_model=...) does not hand over:"
            " give a draft without them as --assistant, or early-exit:LAYERS"
        )
    model = as_causal_lm(DraftModel.load(folder, loaded.model), loaded.model)
    _set_tokens(model, tokens)
    return folder.resolve().name, {"assistant_model": model}


def as_causal_lm(draft: DraftModel, target: PreTrainedModel) -> PreTrainedModel:
    """Return a draft without features as a model of transformers, with the same q.

    Args:
        draft: Its body and head are used, not copied.
        target: Whose embeddings it reads.
    """
    config: Any = draft.body.config
    config.tie_word_embeddings = False
    model: Any = AutoModelForCausalLM.from_config(config, dtype=target.dtype)  # type: ignore[no-untyped-call]
    setattr(model, model.base_model_prefix, draft.body)
    draft.body.set_input_embeddings(target.get_input_embeddings())
    vocab_size = target.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
    model.set_output_embeddings(ReducedHead(draft.head, draft.head_ids, vocab_size))
    model.eval().requires_grad_(False)
    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    return model  # type: ignore[no-any-return]


def _early_exit(choice: str, loaded: LoadedModel, tokens: int | None) -> dict[str, Any]:
    layers = choice.removeprefix("early-exit:")
    most = loaded.config.num_hidden_layers - 1
    if not layers.isdecimal() or not 1 <= int(layers) <= most:
        raise click.ClickException(f"--assistant is {choice!r}: the layers must be 1 to {most}")
    _set_tokens(loaded.model, tokens)
    return {"assistant_early_exit": int(layers)}


def _set_tokens(model: PreTrainedModel, tokens: int | None) -> None:
    """Say how many tokens a round drafts; a fixed number goes without transformers' stop at an unsure token."""
    if tokens is not None:
        config: Any = model.generation_config
        config.update(num_assistant_tokens=tokens, assistant_confidence_threshold=0.0)
