"""The target's states are those of its own forward, and computed once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.model import LoadedModel
from services.distill.data import TeacherData
from services.distill.errors import DistillError
from services.distill.states import check_target, ready_texts, states, write_states
from tests.distill.teaching import FEATURES, WIDTH, corpus_of
from tests.support.engines import load
from tests.support.models import ARCHITECTURES, make_tiny

SERVED = [name for name in ARCHITECTURES if not name.startswith("gemma2")]


@pytest.mark.parametrize("name", SERVED)
def test_states_are_what_the_layers_hand_on(tmp_path: Path, name: str) -> None:
    loaded = load(make_tiny(tmp_path / "model", ARCHITECTURES[name]()))
    check_target(loaded)
    total = loaded.config.num_hidden_layers
    tokens = torch.arange(10).reshape(2, 5) + 3
    handed_on: list[torch.Tensor] = []
    lists = [m for m in loaded.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == total]
    hook = lists[0][0].register_forward_hook(
        lambda _m, _a, out: handed_on.append(out[0] if isinstance(out, tuple) else out)
    )
    features, log_totals = states(loaded, tokens, (1, total))
    hook.remove()
    assert torch.equal(features[..., :32], handed_on[0])
    logits = loaded.model(tokens, use_cache=False).logits
    torch.testing.assert_close(log_totals, torch.logsumexp(logits, -1), rtol=1e-4, atol=1e-4)
    head = loaded.model.get_output_embeddings().weight
    torch.testing.assert_close(features[..., 32:] @ head.T, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("capped", "words"),
    [
        ("final_logit_softcapping", "its logits have a soft cap"),
        ("attn_logit_softcapping", "its attention's scores have a soft cap"),
    ],
)
def test_a_target_with_a_soft_cap_is_refused_by_name(tmp_path: Path, capped: str, words: str) -> None:
    config = ARCHITECTURES["gemma2 with softcaps and some windows"]()
    # So far above a small model's logits that they hardly differ.
    config.update({"final_logit_softcapping": None, "attn_logit_softcapping": None, capped: 900.0})
    loaded = load(make_tiny(tmp_path / "model", config))
    with pytest.raises(DistillError, match=rf"gemma2.*cannot be distilled: {words} \({capped} is 900\.0\)"):
        check_target(loaded)


def test_padding_ids_have_no_part_in_the_denominator(tmp_path: Path) -> None:
    from tests.support.models import make_tiny_llama

    loaded = load(make_tiny_llama(tmp_path / "padded", padding=64))
    tokens = torch.tensor([[3, 4, 5]])
    _, log_totals = states(loaded, tokens, (2,))
    logits = loaded.model(tokens, use_cache=False).logits
    torch.testing.assert_close(log_totals, torch.logsumexp(logits[..., :320], -1), rtol=1e-4, atol=1e-4)
    assert (torch.logsumexp(logits, -1) > log_totals + 1e-3).all()


def test_a_stopped_run_goes_on_and_comes_to_the_same_bytes(target: LoadedModel, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    write_states(target, corpus_of(tmp_path / "whole", 20), tmp_path / "whole", FEATURES, lambda: False, lambda _: None)
    corpus = corpus_of(tmp_path / "parts", 20)
    steps: list[int] = []
    write_states(target, corpus, tmp_path / "parts", FEATURES, lambda: len(steps) == 1, steps.append)
    assert ready_texts(tmp_path / "parts") == 8
    before = [list(steps)]
    write_states(target, corpus, tmp_path / "parts", FEATURES, lambda: False, steps.append)
    assert steps == [8, 16, 20], "nothing is computed twice"
    assert before == [[8]]
    for name in ("states.bin", "logz.bin", "tokens.npy"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_batches_have_the_states_of_their_texts(target: LoadedModel, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 12)
    write_states(target, corpus, tmp_path, FEATURES, lambda: False, lambda _: None)
    batch = TeacherData(tmp_path, 96).batch(np.array([11, 2]))
    features, log_totals = states(target, batch.tokens, FEATURES)
    assert batch.tokens.shape == (2, WIDTH)
    torch.testing.assert_close(batch.features.float(), features, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(batch.log_totals, log_totals, rtol=1e-5, atol=1e-5)
