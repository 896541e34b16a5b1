"""A trained draft is loaded with its target's embeddings and head, and with little else of the target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from services.common.engine.draft_loading import load_draft
from services.common.engine.draft_model import DraftModel
from services.common.engine.model import LoadedModel, LoadOptions, ModelLoadError
from services.common.engine.served_draft import ServedDraft
from tests.support.drafts import make_tiny_draft
from tests.support.engines import load
from tests.support.models import ARCHITECTURES, VOCAB, make_tiny, make_tiny_llama

TOKENS = torch.arange(3, 20).unsqueeze(0)
# The first number in a name is the layer's.
_LATER_LAYER = re.compile(r"^\D*\.[1-9]")


def load_tiny(folder: Path) -> LoadedModel:
    return load_draft(LoadOptions(str(folder), dtype="float32", device="cpu", threads=1))


def logits(draft: DraftModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = ServedDraft(draft).eval()(TOKENS).logits
        return found


def forget_layers(target: Path) -> None:
    """Leave no layer but the first in a target's file."""
    weights = load_file(target / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not _LATER_LAYER.match(name)}
    assert len(kept) < len(weights)
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("feature_layers", [(1, 2), ()])
# With soft caps no draft can be trained.
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "softcaps" not in name])
def test_the_targets_other_layers_are_not_needed(
    architecture: str, feature_layers: tuple[int, ...], tmp_path: Path
) -> None:
    config = ARCHITECTURES[architecture]()
    last = config.num_hidden_layers - 1
    target = make_tiny(tmp_path / "target", config)
    folder = make_tiny_draft(tmp_path / "draft", target, layers=(last, 0), feature_layers=feature_layers)
    whole = load(target)
    expected = DraftModel.load(folder, whole.model)
    forget_layers(target)
    with pytest.raises(ModelLoadError, match="lacks"):
        load(target)

    loaded = load_tiny(folder)
    served = loaded.model
    assert isinstance(served, ServedDraft)
    assert torch.equal(logits(served.draft), logits(expected))
    assert served.draft.body.config.to_dict() == expected.body.config.to_dict()
    for name in ("context_length", "vocab_size", "dtype", "eos_token_ids", "tokenizer_fingerprint"):
        assert getattr(loaded, name) == getattr(whole, name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_in_several_files(tied: bool, tmp_path: Path) -> None:
    config = ARCHITECTURES["llama"]()
    assert isinstance(config, LlamaConfig)
    config.tie_word_embeddings = tied
    target = make_tiny(tmp_path / "target", config)
    folder = make_tiny_draft(tmp_path / "draft", target)
    expected = logits(DraftModel.load(folder, load(target).model))
    model = AutoModelForCausalLM.from_pretrained(target)
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, max_shard_size="40KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    served = load_tiny(folder).model
    assert isinstance(served, ServedDraft)
    assert torch.equal(logits(served.draft), expected)


def test_a_target_that_it_was_not_made_for_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path / "draft", make_tiny_llama(tmp_path / "target"))
    options = LoadOptions(str(folder), dtype="float32", device="cpu", threads=1)
    other = make_tiny_llama(tmp_path / "other", vocab=VOCAB + 1)
    with pytest.raises(ModelLoadError, match=r"is a draft for .*target: its tokenizer is"):
        load_draft(options, str(other))
    wide = make_tiny(tmp_path / "wide", LlamaConfig(**{**ARCHITECTURES["llama"]().to_dict(), "hidden_size": 64}))
    with pytest.raises(ModelLoadError, match="do not fit wide"):
        load_draft(options, str(wide))


def test_positions_are_as_exact_as_the_targets_in_bfloat16(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target")
    folder = make_tiny_draft(tmp_path / "draft", target)
    whole = load(target, "bfloat16").model
    draft = DraftModel.load(folder, whole)
    assert {weight.dtype for weight in draft.parameters()} == {torch.bfloat16}
    assert torch.equal(draft.body.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
