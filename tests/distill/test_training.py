"""Training makes a draft better, and a run that was stopped comes to the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.draft_model import DraftModel
from services.common.engine.model import LoadedModel
from services.distill.learning import _pace
from services.distill.training import Trainer, answer_starts
from tests.distill.teaching import FEATURES, trainer_of


def learn(trainer: Trainer, updates: int) -> None:
    last = trainer.updates + updates
    trainer.run(lambda: trainer.updates >= last, lambda _: None)


@pytest.mark.parametrize("features", [FEATURES, ()], ids=["hidden", "tokens"])
def test_alpha_rises(target: LoadedModel, tmp_path: Path, features: tuple[int, ...]) -> None:
    trainer = trainer_of(target, tmp_path, 80, features)
    before = trainer.measure(steps=3)
    learn(trainer, 60)
    after = trainer.measure(steps=3)
    assert len(after.alphas) == (3 if features else 1)
    assert all(a > b + 0.05 for a, b in zip(after.alphas, before.alphas, strict=True)), (before, after)


def test_a_stopped_run_comes_to_the_same_weights(target: LoadedModel, tmp_path: Path) -> None:
    whole = trainer_of(target, tmp_path / "whole")
    learn(whole, 11)
    first = trainer_of(target, tmp_path / "parts")
    learn(first, 5)
    first.save(tmp_path / "checkpoint.pt")
    second = trainer_of(target, tmp_path / "parts")
    second.restore(tmp_path / "checkpoint.pt")
    learn(second, 6)
    assert second.updates == whole.updates == 11
    assert second.tokens == whole.tokens
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    for name, value in whole.average.state_dict().items():
        assert torch.equal(value, second.average.state_dict()[name]), name


def test_the_learning_rate_falls_to_nothing_at_the_end_of_a_run(target: LoadedModel, tmp_path: Path) -> None:
    assert [_pace(elapsed, began=0.6) for elapsed in (0.6, 0.88)] == [1.0, 1.0]
    assert _pace(0.94, began=0.6) == pytest.approx(0.5)
    assert [_pace(elapsed, began) for elapsed, began in ((1.0, 0.6), (1.01, 0.6), (1.0, 1.0))] == [0.0, 0.0, 0.0]
    trainer = trainer_of(target, tmp_path, 24)
    learn(trainer, 2)
    before = [value.clone() for value in trainer.model.parameters()]
    trainer.run(lambda: trainer.updates >= 4, lambda _: None, lambda: 0.0)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_each_time_through_has_an_order_of_its_own_and_held_out_texts_are_never_in(
    target: LoadedModel, tmp_path: Path
) -> None:
    trainer = trainer_of(target, tmp_path, 24)
    order = trainer._data.shuffled(8, 8, seed=1, start=0)
    batches = [next(order).tolist() for _ in range(4)]
    for epoch in (batches[:2], batches[2:]):
        assert sorted(epoch[0] + epoch[1]) == list(range(8, 24))
    assert batches[:2] != batches[2:]
    later = trainer._data.shuffled(8, 8, seed=1, start=3)
    assert next(later).tolist() == batches[3]


def test_too_few_texts_for_a_batch_are_an_error_and_no_endless_loop(target: LoadedModel, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, 12)
    with pytest.raises(ValueError, match="4 texts"):
        learn(trainer, 1)


def test_a_saved_draft_is_the_same_when_loaded(target: LoadedModel, tmp_path: Path) -> None:
    trainer = trainer_of(target, tmp_path, 24)
    learn(trainer, 2)
    trainer.average.save(tmp_path / "draft")
    loaded = DraftModel.load(tmp_path / "draft", target.model)
    assert loaded.config == trainer.model.config
    for name, value in trainer.average.state_dict().items():
        expected = value.to(torch.bfloat16).to(value.dtype) if value.is_floating_point() else value
        assert torch.equal(loaded.state_dict()[name], expected), name


def test_alpha_is_the_mean_of_the_sum_of_min_p_q(target: LoadedModel, tmp_path: Path) -> None:
    """Recomputed from the target's own logits for one step, over the whole vocabulary."""
    trainer = trainer_of(target, tmp_path, 24, ())
    batch = trainer._data.batch(np.arange(8))
    with torch.no_grad():
        p = torch.softmax(target.model(batch.tokens, use_cache=False).logits, -1)
        a = trainer.average.body(inputs_embeds=trainer.average.embed(batch.tokens), use_cache=False).last_hidden_state
        q = torch.zeros_like(p)
        q[..., trainer.average.head_ids] = torch.softmax(a @ trainer.average.head.T, -1)
    alpha = torch.minimum(p, q).sum(-1).mean()
    # The states are kept in bfloat16.
    assert abs(trainer.measure(steps=1).alphas[0] - float(alpha)) < 5e-3


def test_answers_begin_after_the_bridge_and_a_text_without_one_is_learnt_from_whole() -> None:
    tokens = torch.tensor([[5, 7, 8, 3, 7, 8], [5, 6, 7, 3, 8, 7], [7, 8, 1, 1, 1, 1]])
    assert answer_starts(tokens, (7, 8)).tolist() == [3, 0, 2]
    assert answer_starts(tokens, ()).tolist() == [0, 0, 0]
