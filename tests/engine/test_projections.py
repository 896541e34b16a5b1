"""Exchanged projections compute what the model's own do, and can be taken out again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.pytorch_utils import Conv1D

from services.common.engine import projections
from services.common.engine.projections import exchange_projections
from tests.support.engines import Library, StartEngine, assert_close, evaluate, load, random_tokens
from tests.support.models import ARCHITECTURES, make_tiny

TEXT = random_tokens(random.Random(1), 30)


def logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return output


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exchanged_model_computes_the_same_and_undo_puts_the_very_modules_back(tmp_path: Path, name: str) -> None:
    model = load(make_tiny(tmp_path / "model", ARCHITECTURES[name]())).model
    before = dict(model.named_modules())
    expected = [logits(model, TEXT[:count]) for count in (1, 7, 8, 9, 30)]
    undo = exchange_projections(model)
    assert dict(model.named_modules()) != before
    for count, own in zip((1, 7, 8, 9, 30), expected, strict=True):
        assert_close(logits(model, TEXT[:count]), own)
    undo()
    assert dict(model.named_modules()) == before
    torch.testing.assert_close(logits(model, TEXT), expected[-1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2 with biases", "gpt2 with learned positions"])
def test_in_bfloat16(tmp_path: Path, name: str) -> None:
    model = load(make_tiny(tmp_path / "model", ARCHITECTURES[name]()), "bfloat16").model
    expected = logits(model, TEXT)
    exchange_projections(model)
    assert_close(logits(model, TEXT), expected, 5e-2)


def test_what_a_block_calls_on_one_input_becomes_one_product(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path / "model", ARCHITECTURES["qwen2 with biases"]())).model
    before = sum(type(module) is nn.Linear for module in model.modules())
    assert before == 2 * 7 + 1
    exchange_projections(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    products = [module for module in model.modules() if isinstance(module, projections.Projection)]
    # q, k, v in one; o; gate and up in one; down; and the head.
    assert len(products) == 2 * 4 + 1


class Block(nn.Module):
    """Three projections of one input and one more."""

    def __init__(self, dtype: torch.dtype = torch.float32, value_bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 32, dtype=dtype)
        self.k_proj = nn.Linear(16, 8, dtype=dtype)
        self.v_proj = nn.Linear(16, 8, bias=value_bias, dtype=dtype)
        self.c_proj = Conv1D(16, 48).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of all three; the second one is called first."""
        keys = self.k_proj(x)
        projected: torch.Tensor = self.c_proj(torch.cat([self.q_proj(x), keys, self.v_proj(x)], dim=-1))
        return projected


def test_what_is_called_in_another_order_is_noticed() -> None:
    with torch.inference_mode():
        block = Block()
        exchange_projections(block)
        with pytest.raises(RuntimeError, match="fused for one input were called on different ones"):
            block(torch.ones(1, 4, 16))


def test_biases_that_only_some_have_are_not_fused() -> None:
    with torch.inference_mode():
        block, x = Block(value_bias=False), torch.randn(1, 4, 16)
        expected = block(x)
        exchange_projections(block)
        assert not any(isinstance(module, projections._First) for module in block.modules())
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


def test_subclasses_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with torch.inference_mode():
        block = nn.ModuleDict({name: Doubled(4, 4) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
        before = dict(block.named_modules())
        exchange_projections(block)
        assert dict(block.named_modules()) == before


def test_nothing_is_packed_in_a_dtype_without_a_layout() -> None:
    block = Block(torch.float16)
    for dtype in (torch.float16, torch.float64):
        weight, bias = torch.ones(4, 4, dtype=dtype), torch.ones(4, dtype=dtype)
        assert projections._packed(weight, bias) is None
    own = block.c_proj
    undo = exchange_projections(block)
    assert block.c_proj is own, "a single projection stays as it is"
    assert isinstance(block.q_proj, projections._First), "one product for three is worth it all the same"
    undo()
    assert type(block.q_proj) is nn.Linear


def test_fused_without_packing_computes_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(projections, "_packable", lambda _: False)
    model = load(make_tiny(tmp_path / "model", ARCHITECTURES["qwen2 with biases"]())).model
    expected = logits(model, TEXT)
    exchange_projections(model)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert_close(logits(model, TEXT), expected)


async def test_a_model_that_calls_them_on_different_inputs_keeps_its_own_and_is_served(
    llama_folder: Path,
    library: Library,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward = LlamaAttention.forward

    def with_a_copy(self: LlamaAttention, *args: object, **kwargs: object) -> object:
        own, self.k_proj = self.k_proj, _OnACopy(self.k_proj)
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.k_proj = own

    monkeypatch.setattr(LlamaAttention, "forward", with_a_copy)
    loaded = load(llama_folder)
    own = dict(loaded.model.named_modules())
    engine = await start_engine(loaded)
    assert "the model's own projections are used: projections fused for one input" in caplog.text
    assert dict(loaded.model.named_modules()) == own
    assert_close(await evaluate(await engine.open(40), 0, TEXT, 3), library.logits(TEXT, 3))


class _OnACopy(nn.Module):
    def __init__(self, project: nn.Module) -> None:
        super().__init__()
        self.project = project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project something equal to the input that is not the input."""
        projected: torch.Tensor = self.project(x.clone())
        return projected
