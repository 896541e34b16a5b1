"""The systems themselves: the service over gRPC with scripted workers, and transformers with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
import torch
from transformers import GenerationConfig

from bench.assistants import as_causal_lm, assistant
from bench.record import Place, record
from bench.systems import Job, Service, Transformers
from paceline.v1 import worker_pb2
from services.common.engine.draft_model import DraftConfig, DraftModel
from services.common.engine.model import LoadedModel
from tests.support.cluster import scripted_cluster
from tests.support.engines import load
from tests.support.laws import close_law
from tests.support.models import VOCAB, make_tiny_llama

TOKENS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    target = load(make_tiny_llama(tmp_path_factory.mktemp("target"), seed=3))
    target.model.generation_config = GenerationConfig(pad_token_id=0)
    return target


@pytest.fixture(scope="module")
def draft(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    config = DraftConfig("tiny", loaded.tokenizer_fingerprint, layers=(0,))
    DraftModel(config, loaded.model, torch.arange(0, VOCAB, 2)).save(folder)
    return folder


def job(temperature: float, top_p: float = 1.0) -> Job:
    return Job((5, 6, 7, 5, 6), temperature, TOKENS, seed=1, top_p=top_p)


async def test_the_service_is_asked_what_a_job_says_and_timed() -> None:
    async with scripted_cluster(close_law(distance=0.5, seed=1)) as cluster:
        service = Service("ours", cluster.stub, gamma=3)
        asked = Job((0, 1), 1.0, TOKENS, seed=1)
        outcome = await service.write(asked)
        coupled = await Service("c", cluster.stub, 3, worker_pb2.VERIFICATION_COUPLED).write(asked)
        alone = await Service("alone", cluster.stub, gamma=0).write(asked)
    assert len(outcome.tokens) == len(coupled.tokens) == TOKENS
    assert 0 < outcome.first_token_s <= outcome.wall_s
    assert 1 <= outcome.first_tokens <= 4
    found = record(Place("temperature 1", 0, "1", "qa"), "ours", [2], [outcome], outcome.wall_s, 0.0)
    assert found.rounds is not None
    assert found.rounds.gammas[3] == max(found.rounds.gammas)
    assert found.rounds.rounds + sum(found.rounds.accepted) >= TOKENS
    assert sum(alone.rounds[i].proposed for i in range(len(alone.rounds))) == 0
    assert len(alone.rounds) == TOKENS


@pytest.mark.parametrize("choice", ["", "early-exit:1", "lookup"])
async def test_transformers_with_any_help_writes_what_it_writes_alone(
    choice: str, loaded: LoadedModel, draft: Path
) -> None:
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if choice != "lookup":
        words, options = assistant(choice, draft, loaded, 3)
        assert words == (choice or draft.name)
    helped, alone = Transformers(loaded, "helped", options), Transformers(loaded)
    mine, theirs = await helped.write(job(0.0)), await alone.write(job(0.0))
    # In float32: a pass over several positions rounds as one over one does, but for the last bits.
    assert mine.tokens == theirs.tokens
    assert (len(theirs.tokens), theirs.first_tokens) == (TOKENS, 1)
    assert 0 < mine.first_token_s < mine.wall_s
    sampled = await helped.write(job(0.7, 0.9))
    assert len(sampled.tokens) == TOKENS
    assert sampled.tokens == (await helped.write(job(0.7, 0.9))).tokens


def test_the_assistant_has_the_drafts_own_q(loaded: LoadedModel, draft: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    own = DraftModel.load(draft, loaded.model)
    with torch.inference_mode():
        states = own.body(inputs_embeds=own.embed(ids)).last_hidden_state
        expected = states @ own.head.T
        model: Any = as_causal_lm(DraftModel.load(draft, loaded.model), loaded.model)
        logits = model(ids).logits
    assert logits.shape == (1, 5, VOCAB)
    torch.testing.assert_close(logits[..., ::2], expected)
    assert torch.isneginf(logits[..., 1::2]).all()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("early-exit:2", "--assistant is 'early-exit:2': the layers must be 1 to 1"),
        ("early-exit:x", "--assistant is 'early-exit:x': the layers must be 1 to 1"),
        ("", "--assistant is needed"),
    ],
)
def test_what_is_no_assistant_is_refused(choice: str, message: str, loaded: LoadedModel) -> None:
    with pytest.raises(click.ClickException, match=message):
        assistant(choice, None, loaded, None)


def test_a_draft_that_reads_hidden_states_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    config = DraftConfig("tiny", loaded.tokenizer_fingerprint, layers=(0,), feature_layers=(1, 2))
    DraftModel(config, loaded.model, torch.arange(64)).save(tmp_path / "hidden")
    with pytest.raises(click.ClickException, match="hidden reads the target's hidden states"):
        assistant(str(tmp_path / "hidden"), None, loaded, None)
    told, arguments = assistant("", tmp_path / "hidden", loaded, None)
    assert (told, arguments) == ("early-exit:1", {"assistant_early_exit": 1}), "where it is measured, another one helps"
