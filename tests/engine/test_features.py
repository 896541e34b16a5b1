"""Hidden states that a target keeps for a draft: those of the library, however they came to their places."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.common.engine import compiled
from services.common.engine.draft_model import default_feature_layers
from services.common.engine.engine import Engine
from services.common.engine.features import FeaturePool
from services.common.engine.scheduler import PassLimits
from services.common.engine.session import ModelSession
from services.common.engine.worker import _feature_layers
from services.common.specdec.errors import InvalidFieldError, StartupError
from services.common.specdec.types import SamplingParams
from services.target_worker.verifier import Verifier
from tests.support.drafts import Trained, make_tiny_draft
from tests.support.engines import StartEngine, load, random_tokens, runner_of
from tests.support.models import ARCHITECTURES, make_tiny, make_tiny_llama

LAYERS = (1, 2)


def numbers(data: bytes, width: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, width).float()


async def features(session: ModelSession, base: int, tokens: list[int], start: int) -> bytes:
    told, _ = await session.evaluate(base, tokens, 1, lambda _: session.features(start))
    assert told is not None
    return told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_llama(folder / "target")
    return Trained(make_tiny_draft(folder / "draft", target, feature_layers=LAYERS), target)


@pytest.mark.parametrize("architecture", ["llama", "gpt2 with learned positions"])
async def test_they_are_the_librarys(architecture: str, tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny(tmp_path / "target", ARCHITECTURES[architecture]())
    trained = Trained(make_tiny_draft(tmp_path / "draft", target, feature_layers=LAYERS), target)
    engine = await start_engine(target, feature_layers=LAYERS, passes=PassLimits(prefill_chunk=8))
    await check_sessions(engine, trained)


async def check_sessions(engine: Engine, trained: Trained) -> None:
    text = random_tokens(random.Random(1), 50)
    first, second = await engine.open(80), await engine.open(80)
    width = 2 * 32
    told = numbers(await features(first, 0, text, 10), width)
    torch.testing.assert_close(told, trained.features(text)[10:].float(), rtol=2e-2, atol=2e-2)
    # Cropped, and something else in its place.
    other = [*text[:40], 5, 6, 7]
    told = numbers(await features(first, 40, other[40:], 38), width)
    torch.testing.assert_close(told, trained.features(other)[38:].float(), rtol=2e-2, atol=2e-2)
    # Copied from the first session with its keys and values.
    hits = engine.counters.prefix_hits
    told = numbers(await features(second, 0, other, 0), width)
    assert engine.counters.prefix_hits == hits + 1
    torch.testing.assert_close(told, trained.features(other).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
async def test_compiled_passes_keep_them_too(
    trained: Trained, tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    for _ in ("compiled", "loaded"):
        engine = await start_engine(make_tiny_llama(tmp_path / "target"), feature_layers=LAYERS, compile=True)
        assert runner_of(engine).compiled
        await check_sessions(engine, trained)
        monkeypatch.setattr(compiled, "_compile", None)


async def test_what_cannot_be_asked_for_is_refused_by_name(tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny_llama(tmp_path / "target")
    verifier = Verifier(await start_engine(target, feature_layers=LAYERS))
    session = await verifier.open(SamplingParams(), 10, 20)
    text = random_tokens(random.Random(2), 10)
    with pytest.raises(InvalidFieldError, match="features_from is 10: must be below 10"):
        await session.verify(0, text, 1, features_from=10)
    verified = await session.verify(0, text, 1, features_from=9)
    assert verified.features is not None
    assert len(verified.features) == 2 * 2 * 32
    assert (await session.verify(0, text, 1)).features is None


async def test_a_target_that_keeps_none_answers_without(tmp_path: Path, start_engine: StartEngine) -> None:
    verifier = Verifier(await start_engine(make_tiny_llama(tmp_path / "target")))
    session = await verifier.open(SamplingParams(), 10, 20)
    assert (await session.verify(0, [1, 2, 3], 1, features_from=0)).features is None


@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 1), (1, 1)])
def test_layers_that_there_are_not_are_refused(layers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--features"):
        FeaturePool(load(make_tiny_llama(tmp_path / "target")).model, layers)


async def test_their_memory_is_counted(tmp_path: Path, start_engine: StartEngine) -> None:
    target = make_tiny_llama(tmp_path / "target")
    sizes = [
        (await start_engine(target, kv_cache_memory="1MiB", feature_layers=layers)).memory.size
        for layers in ((), LAYERS)
    ]
    token_bytes = [2**20 // size for size in sizes]
    assert token_bytes[1] - token_bytes[0] == pytest.approx(2 * 2 * 32, abs=2)


def test_by_default_each_quarter_of_the_layers() -> None:
    assert default_feature_layers(30) == (7, 15, 22, 30)
    assert default_feature_layers(2) == (1, 2)


def test_a_model_that_does_not_show_its_layers_is_served_without(tmp_path: Path) -> None:
    loaded = load(make_tiny_llama(tmp_path / "target"))
    assert _feature_layers("auto", loaded) == LAYERS
    loaded.model.base_model.layers = torch.nn.ModuleDict({"0": torch.nn.Identity(), "1": torch.nn.Identity()})
    assert _feature_layers("auto", loaded) == ()
    with pytest.raises(StartupError, match="--features is 1,2: must be none here"):
        FeaturePool(loaded.model, _feature_layers("1,2", loaded))
