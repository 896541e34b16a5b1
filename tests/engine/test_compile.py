"""Compiled passes give what eager ones give, stay in their sessions' places, and are no condition for serving."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from services.common.engine import compiled, saved_graphs
from services.common.engine.compiled import MOST_TOKENS, CompiledForward
from services.common.engine.draft_loading import load_draft
from services.common.engine.model import LoadOptions
from services.common.engine.runner import Feed, ModelRunner
from services.common.engine.saved_graphs import SavedGraphs
from services.common.engine.served_draft import Given, ServedDraft
from tests.support.drafts import make_tiny_draft
from tests.support.engines import Library, StartEngine, assert_close, evaluate, load, random_tokens, runner_of
from tests.support.models import ARCHITECTURES, make_tiny

# The compiler's own, from inside torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

_SIZE = 400
_ROOM = 100


@pytest.fixture(scope="module")
def cache() -> Iterator[None]:
    """Let what is compiled here be found by nobody else."""
    with torch._inductor.utils.fresh_cache():
        yield


@pytest.fixture(scope="module")
def runners(cache: None, llama_folder: Path) -> tuple[ModelRunner, ModelRunner]:
    """An eager runner and a compiled one of the same model."""
    eager, compiled_one = (ModelRunner(load(llama_folder)) for _ in range(2))
    for runner in (eager, compiled_one):
        runner.prepare(_SIZE)
    compiled_one.compile()
    assert compiled_one.compiled
    return eager, compiled_one


def passes() -> list[list[Feed]]:
    """Passes of one and of several sessions, ragged, with crops, with rows wanted of all, some and no tokens."""
    source = random.Random(5)
    feeds = [
        [(0, 30, 1)],
        [(0, 1, 1)],
        [(30, 1, 1), (0, 5, 5), (0, 2, 0)],
        [(31, 4, 4), (5, 1, 1), (2, 7, 3)],
        [(33, 1, 0)],
        [(34, MOST_TOKENS - 9, 1), (6, 1, 1), (9, 8, 8)],
        [(20, MOST_TOKENS + 10, 2)],
    ]
    return [
        [
            Feed(i * _ROOM, position, random_tokens(source, count), rows)
            for i, (position, count, rows) in enumerate(each)
        ]
        for each in feeds
    ]


def run(runner: ModelRunner, feeds: Sequence[Feed]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return runner.run(feeds)


def assert_alike(compiled_one: ModelRunner, eager: ModelRunner) -> None:
    for feeds in passes():
        for ours, theirs, feed in zip(run(compiled_one, feeds), run(eager, feeds), feeds, strict=True):
            assert len(ours) == feed.rows
            if feed.rows:
                assert_close(ours, theirs)


@pytest.mark.slow
def test_compiled_passes_are_the_eager_ones(runners: tuple[ModelRunner, ModelRunner]) -> None:
    eager, compiled_one = runners
    assert_alike(compiled_one, eager)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a graph is compiled."""

    def fail(*_args: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiled, "_compile", fail)


@pytest.mark.slow
def test_the_next_start_loads_what_was_compiled(
    runners: tuple[ModelRunner, ModelRunner], llama_folder: Path, no_compiler: None
) -> None:
    eager, _ = runners
    started_again = ModelRunner(load(llama_folder))
    started_again.prepare(_SIZE)
    started_again.compile()
    assert started_again.compiled
    assert_alike(started_again, eager)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["weights", "features", "code"])
def test_a_graph_is_of_one_model_and_one_code(
    runners: tuple[ModelRunner, ModelRunner],
    llama_folder: Path,
    tmp_path: Path,
    no_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    folder = make_tiny(tmp_path / "other", ARCHITECTURES["llama"](), seed=11) if change == "weights" else llama_folder
    if change == "code":
        monkeypatch.setattr(saved_graphs, "_code", lambda _model: ["another"])
    runner = ModelRunner(load(folder), (1, 2) if change == "features" else ())
    runner.prepare(_SIZE)
    runner.compile()
    assert not runner.compiled
    assert "compiled again" in caplog.text


@pytest.mark.slow
def test_a_saved_graph_that_computes_something_else_is_compiled_anew(
    runners: tuple[ModelRunner, ModelRunner],
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = ModelRunner(load(llama_folder))
    runner.prepare(_SIZE)
    with monkeypatch.context() as patched:
        patched.setattr(SavedGraphs, "load", lambda *_: lambda _ids, _at, keep: torch.zeros(len(keep), 4096))
        runner.compile()
    assert runner.compiled
    assert "compiled anew, what was saved is of no use: ModelLoadError" in caplog.text
    assert_alike(runner, runners[0])


def test_a_file_that_is_no_graph_is_compiled_anew_and_what_cannot_be_saved_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    graphs = SavedGraphs(tmp_path, torch.nn.Linear(2, 2), {})
    assert graphs.load("one", {}) is None
    assert caplog.text == ""
    graphs.save("one", torch.zeros)
    assert "the compiled graph is not kept: AttributeError" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert graphs._folder is not None
    graphs._folder.mkdir()
    (graphs._folder / "one.graph").write_bytes(b"half a")
    assert graphs.load("one", {}) is None
    assert "one.graph cannot be used: UnpicklingError" in caplog.text
    graphs.drop()
    assert list(graphs._folder.iterdir()) == []


def test_a_model_whose_code_is_in_no_file_is_compiled_each_time(tmp_path: Path) -> None:
    module = type("Module", (torch.nn.Module,), {"__module__": "builtins"})()
    graphs = SavedGraphs(tmp_path, module, {})
    graphs.save("one", torch.zeros)
    assert graphs.load("one", {}) is None
    graphs.drop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("feeds", [[Feed(100, 3, [5], 1)], [Feed(100, 3, [5, 6, 7], 1), Feed(200, 0, [8, 9], 2)]])
def test_only_the_places_of_the_fed_tokens_are_written(
    runners: tuple[ModelRunner, ModelRunner], feeds: list[Feed]
) -> None:
    _, runner = runners
    pool = runner._ready()
    before = {i: (pool._keys[i].clone(), pool._values[i].clone()) for i in pool._keys}
    for tensors in (pool._keys, pool._values):
        for tensor in tensors.values():
            tensor.fill_(7.0)
    run(runner, feeds)
    fed = {feed.start + feed.position + i for feed in feeds for i in range(len(feed.tokens))}
    for tensors in (pool._keys, pool._values):
        for tensor in tensors.values():
            changed = (tensor != 7.0).any(dim=-1).any(dim=1)[0].nonzero().flatten().tolist()
            assert set(changed) == fed
    for i, (keys, values) in before.items():
        pool._keys[i].copy_(keys)
        pool._values[i].copy_(values)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2 with softcaps and some windows", "gpt2 with learned positions"])
def test_other_architectures(tmp_path: Path, cache: None, name: str) -> None:
    runner = ModelRunner(load(make_tiny(tmp_path / "model", ARCHITECTURES[name]())))
    runner.prepare(_SIZE)
    runner.compile()
    assert runner.compiled


@pytest.mark.slow
@pytest.mark.parametrize("feature_layers", [(1, 2), ()], ids=["fed", "tokens"])
def test_a_trained_draft(
    llama_folder: Path,
    tmp_path: Path,
    cache: None,
    monkeypatch: pytest.MonkeyPatch,
    feature_layers: tuple[int, ...],
) -> None:
    """Its states are those of each pass: given, its own, and of other places than when it was compiled."""
    folder = make_tiny_draft(tmp_path / "draft", llama_folder, layers=(0, 1), feature_layers=feature_layers, window=20)
    options = LoadOptions(str(folder), dtype="float32", device="cpu", threads=1)
    first = ModelRunner(load_draft(options))
    first.prepare(_SIZE)
    first.compile()
    assert first.compiled
    monkeypatch.setattr(compiled, "_compile", None)
    # Loaded, and no worse for it.
    models = [load_draft(options) for _ in range(2)]
    eager, compiled_one = (ModelRunner(loaded) for loaded in models)
    for runner in (eager, compiled_one):
        runner.prepare(_SIZE)
    compiled_one.compile()
    assert compiled_one.compiled
    source = torch.Generator().manual_seed(3)
    # Each of them twice: with the target's states, where it takes any, and from its own.
    for feeds in [*passes(), *passes()]:
        if feature_layers and feeds[0].position % 2 == 0:
            feeds = [_given(feed, source) for feed in feeds]
        for ours, theirs, feed in zip(run(compiled_one, feeds), run(eager, feeds), feeds, strict=True):
            assert len(ours) == feed.rows
            if feed.rows:
                assert_close(ours, theirs)
    if feature_layers:
        kept = [model.model._states for model in models if isinstance(model.model, ServedDraft)]
        assert kept[0] is not None
        assert kept[1] is not None
        assert_close(kept[1][:_SIZE], kept[0][:_SIZE])
        assert kept[0][:_SIZE].count_nonzero() > 0


def _given(feed: Feed, source: torch.Generator) -> Feed:
    """Let a draft be told of the state after each of a feed's tokens but the last."""
    count = len(feed.tokens) - 1
    states = torch.randn((count, 64), generator=source).to(torch.bfloat16)
    return dataclasses.replace(feed, given=Given(feed.position, states)) if count else feed


@pytest.mark.slow
async def test_two_compiled_engines_in_one_process_keep_apart(
    llama_folder: Path, tmp_path: Path, cache: None, start_engine: StartEngine
) -> None:
    other = make_tiny(tmp_path / "other", ARCHITECTURES["llama"](), seed=9)
    tokens = random_tokens(random.Random(3), 20)
    folders = (llama_folder, other)
    engines = [await start_engine(folder, compile=True) for folder in folders]
    sessions = [await engine.open(50) for engine in engines]
    for folder, engine, session in zip(folders, engines, sessions, strict=True):
        assert runner_of(engine).compiled
        await evaluate(session, 0, tokens[:-1])
        assert_close(await evaluate(session, len(tokens) - 1, tokens[-1:]), Library(folder).logits(tokens, 1))


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing be found that was compiled before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    "error", [RuntimeError("no C++ compiler was found\nand a long story"), NotImplementedError("a kind of layer")]
)
async def test_what_cannot_be_compiled_is_served_eager_and_the_reason_logged(
    llama_folder: Path,
    library: Library,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(compiled, "_compile", fail)
    with caplog.at_level(logging.WARNING):
        engine = await start_engine(llama_folder, compile=True)
    (record,) = [record for record in caplog.records if "not compiled" in record.message]
    assert type(error).__name__ in record.message
    assert str(error).splitlines()[0] in record.message
    assert "long story" not in record.message
    tokens = random_tokens(random.Random(3), 20)
    assert_close(await evaluate(await engine.open(50), 0, tokens, 3), library.logits(tokens, 3))


@pytest.mark.usefixtures("empty_cache")
async def test_a_compiled_forward_that_computes_something_else_is_not_used(
    llama_folder: Path,
    library: Library,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(forward: object, example: list[torch.Tensor], several: bool) -> object:
        del forward, example, several
        return lambda ids, positions, keep: torch.zeros(len(keep), 4096)

    monkeypatch.setattr(compiled, "_compile", broken)
    engine = await start_engine(llama_folder, compile=True)
    assert "compiled passes: logits differ" in caplog.text
    tokens = random_tokens(random.Random(4), 20)
    assert_close(await evaluate(await engine.open(50), 0, tokens, 3), library.logits(tokens, 3))


@pytest.mark.parametrize(("chosen", "expected"), [(None, "home/compiled"), ("chosen", "chosen")])
async def test_compiled_code_is_kept_with_the_models_unless_another_folder_is_chosen(
    llama_folder: Path,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chosen: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda *_: torch.zeros)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / chosen) if chosen else default_cache_dir())
    await start_engine(llama_folder, compile=True)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / expected)


async def test_nothing_is_compiled_unasked(
    llama_folder: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(CompiledForward, "__init__", fail)
    assert not runner_of(await start_engine(llama_folder)).compiled
