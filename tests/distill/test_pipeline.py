"""From a target to a draft in several runs, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.engine.draft_model import DraftModel
from services.common.engine.model import LoadedModel
from services.common.specdec.errors import StartupError
from services.distill.errors import DistillError
from services.distill.pipeline import distill
from services.distill.run import DistillOptions, Outcome, Run
from tests.distill.teaching import texts
from tests.support.models import ARCHITECTURES, make_tiny, make_tiny_llama


class Watch:
    """Hears of a run's progress, and stops it where it has come so far."""

    def __init__(self, phase: str = "", times: int = 0) -> None:
        self.said: list[str] = []
        self.phases: list[str] = []
        self._stop = (phase, times)

    def say(self, words: str) -> None:
        self.said.append(words)

    def update(self, phase: str, share: float, words: str) -> None:
        assert share >= 0
        assert words
        self.phases.append(phase)

    def stop(self) -> bool:
        phase, times = self._stop
        return bool(phase) and self.phases.count(phase) >= times


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> DistillOptions:
    """Time enough on the slowest machine: tests stop a run by what it has done."""
    return DistillOptions(
        str(folder), tmp_path / "out", hours=1, threads=1, tokens_to_write=1000, device="cpu", width=24, batch=8
    )


def run(options: DistillOptions, watch: Watch) -> Outcome:
    return distill(options, watch.stop, watch)


def settings(options: DistillOptions) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((options.out / "work" / "settings.json").read_text())
    return found


def test_a_draft_is_made_over_several_runs(options: DistillOptions, target: LoadedModel) -> None:
    assert run(options, Watch("writing", 1)).score is None, "stopped while it wrote"
    assert run(options, Watch("states", 1)).score is None, "stopped while it computed states"
    first = Watch("training", 2)
    outcome = run(options, first)
    assert outcome.stopped
    assert outcome.score is not None
    assert len(outcome.score.alphas) == 5
    assert {"writing"} not in first.phases, "what was written is not written again"
    out = options.out
    draft = DraftModel.load(out, target.model)
    assert draft.config.target == options.target.rsplit("/", 1)[-1]
    assert draft.config.layers == (2,)
    assert draft.config.feature_layers == (1, 2, 3)
    assert draft.config.tokenizer_fingerprint == target.tokenizer_fingerprint
    assert {0, 1} <= set(draft.head_ids.tolist()), "the named tokens are in the head whatever was written"
    card = (out / "README.md").read_text()
    assert f"{outcome.score.alphas[0]:.3f}" in card
    assert "look it up" in card, "this target does not tell its licence"
    run(options, Watch("training", 1))
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["updates"] for line in logged if line["updates"]][-1] == 3
    assert logged[-1]["hours"] > logged[0]["hours"] > 0
    assert set(settings(options)["spent_s"]) == {"writing", "states", "training"}
    assert not list(out.rglob("*.partial"))


def test_a_run_that_is_stopped_has_the_texts_of_one_that_is_not(options: DistillOptions, tmp_path: Path) -> None:
    whole = dataclasses.replace(options, out=tmp_path / "whole", batch=3)
    run(whole, Watch("training", 1))
    run(options, Watch("writing", 1))
    run(options, Watch("training", 1))
    for name in ("tokens.npy", "lengths.npy"):
        assert (whole.out / "work/data" / name).read_bytes() == (options.out / "work/data" / name).read_bytes()
    assert np.load(whole.out / "work/data/tokens.npy").shape[1] == 24


def test_given_texts_are_not_written_again_and_both_kinds_are_trained(options: DistillOptions, tmp_path: Path) -> None:
    given = texts(tmp_path / "given.npy", 20)
    options = dataclasses.replace(
        options, texts=(given,), tokens_to_write=None, kind="tokens", layers=2, head=60, seed=5
    )
    watch = Watch("training", 2)
    outcome = run(options, watch)
    assert "writing" not in watch.phases
    assert outcome.score is not None
    assert len(outcome.score.alphas) == 1
    draft = json.loads((options.out / "draft_config.json").read_text())
    assert draft["layers"] == [0, 2]
    assert draft["feature_layers"] == []
    # Once begun, nothing need be said again, the texts neither.
    again = dataclasses.replace(options, texts=(), kind=None, layers=None, head=None, seed=None)
    watch = Watch("training", 1)
    run(again, watch)
    assert "writing" not in watch.phases


def test_hours_that_are_over_end_a_run_before_its_phases(options: DistillOptions) -> None:
    watch = Watch()
    outcome = run(dataclasses.replace(options, hours=1e-6), watch)
    assert outcome == Outcome(None, stopped=False)
    assert watch.phases == []


def test_the_hours_are_shared_out(options: DistillOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("services.distill.run.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    clock = Run(dataclasses.replace(options, hours=2), lambda: False, Watch())
    now_s[0] += 0.4 * 7200 - 1
    assert not clock.over(0.4)
    now_s[0] += 1
    assert clock.over(0.4)
    assert not clock.over()
    now_s[0] += 0.6 * 7200
    assert clock.over()


def test_too_few_texts_say_what_is_missing(options: DistillOptions, tmp_path: Path) -> None:
    options = dataclasses.replace(options, texts=(texts(tmp_path / "few.npy", 5),), tokens_to_write=0)
    with pytest.raises(DistillError, match=r"only 5 texts .* 9 are needed"):
        run(options, Watch())


def begun(options: DistillOptions) -> None:
    run(dataclasses.replace(options, hours=1e-6), Watch())


def occupied(options: DistillOptions) -> None:
    options.out.mkdir()
    (options.out / "thesis.txt").write_text("not to be lost")


@pytest.mark.parametrize(
    ("before", "changes", "words"),
    [
        (None, {"layers": 4}, "--layers is 4: must be at most 3, the target's"),
        (None, {"head": 1000}, "--head is 1000: must be at most 320"),
        (begun, {"kind": "tokens"}, "--kind is 'tokens'|--kind is tokens: must be hidden"),
        (begun, {"seed": 7}, "--seed is 7: must be 0"),
        (begun, {"head": 100}, "--head is 100: must be 320"),
        (occupied, {}, "must be a new or empty folder"),
        (None, {"target": "/no/such/folder"}, "There is no folder"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: DistillOptions, before: Callable[[DistillOptions], None] | None, changes: dict[str, Any], words: str
) -> None:
    if before is not None:
        before(options)
    with pytest.raises(StartupError, match=words):
        run(dataclasses.replace(options, **changes), Watch())
    if before is occupied:
        assert [path.name for path in options.out.iterdir()] == ["thesis.txt"]


def test_another_targets_folder_is_refused(options: DistillOptions, tmp_path: Path) -> None:
    begun(options)
    other = make_tiny_llama(tmp_path / "other", seed=9, layers=3)
    with pytest.raises(DistillError, match="has the draft of another target"):
        run(dataclasses.replace(options, target=str(other)), Watch())


def test_a_full_disk_is_told_before_anything_is_written(
    options: DistillOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DistillError, match=r"--out .*0\.0 GB are free"):
        run(options, Watch())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma2 with softcaps and some windows", "gemma2.*cannot be distilled"),
        ("mistral with windows", "look back on 8 tokens, must be 24 or more"),
    ],
)
def test_targets_that_cannot_be_distilled_are_refused_by_name(
    options: DistillOptions, tmp_path: Path, name: str, words: str
) -> None:
    target = make_tiny(tmp_path / "target", ARCHITECTURES[name]())
    with pytest.raises(DistillError, match=words):
        run(dataclasses.replace(options, target=str(target)), Watch())
    assert not (options.out / "work" / "settings.json").exists()


@pytest.mark.parametrize(
    "name",
    ["qwen2 with biases", "qwen3 with norms of q and k", "gemma", "gpt2 with learned positions", "gpt-neox",
     "phi3 with one projection for q, k and v", "mixtral with experts"],
)  # fmt: skip
def test_other_architectures_are_distilled(options: DistillOptions, tmp_path: Path, name: str) -> None:
    target = make_tiny(tmp_path / "target", ARCHITECTURES[name]())
    given = texts(tmp_path / "given.npy", 20)
    watch = Watch("training", 1)
    outcome = run(dataclasses.replace(options, target=str(target), texts=(given,), tokens_to_write=0), watch)
    assert outcome.score is not None
    assert 0 < outcome.score.alphas[0] < 1
    weights = DraftModel.load(options.out, _model(target)).state_dict()
    assert all(torch.isfinite(value).all() for value in weights.values())


def _model(folder: Path) -> Any:
    from tests.support.engines import load

    return load(folder).model


@pytest.fixture
def started(options: DistillOptions, tmp_path: Path) -> DistillOptions:
    """A run that begins with a draft that another folder has come to."""
    given = texts(tmp_path / "given.npy", 20)
    first = dataclasses.replace(options, out=tmp_path / "first", texts=(given,), tokens_to_write=0, head=60)
    run(first, Watch("training", 12))
    return dataclasses.replace(options, start=first.out, texts=(given,), tokens_to_write=0)


def test_a_draft_begins_as_another_one(started: DistillOptions, target: LoadedModel) -> None:
    assert started.start is not None
    run(started, Watch("states", 1))
    before, fresh = (DraftModel.load(started.start, target.model).state_dict() for _ in range(2))
    # What it begins with is kept: that folder may go.
    shutil.rmtree(started.start)
    run(dataclasses.replace(started, start=None, texts=()), Watch("training", 1))
    after = DraftModel.load(started.out, target.model)
    assert torch.equal(after.head_ids, before["head_ids"])
    trained = {name: value for name, value in after.state_dict().items() if value.is_floating_point()}
    assert all((value - before[name]).abs().max() < 0.01 for name, value in trained.items()), "one small update away"
    own = DraftModel(after.config, target.model, after.head_ids).state_dict()
    assert any((own[name] - fresh[name]).abs().max() > 0.01 for name in trained), "the target's layers are farther"


def another_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "draft_config.json").read_text())
    (folder / "draft_config.json").write_text(json.dumps({**config, "tokenizer_fingerprint": "other"}))


def another_width(folder: Path) -> None:
    weights = load_file(folder / "draft.safetensors")
    save_file({name: value[..., :-2].contiguous() for name, value in weights.items()}, folder / "draft.safetensors")


def broken(folder: Path) -> None:
    (folder / "draft.safetensors").write_bytes(b"not this")


@pytest.mark.parametrize(
    ("change", "changes", "words"),
    [
        (None, {"layers": 2}, "--layers is 2: must be 1, as the draft of --start has"),
        (None, {"kind": "tokens"}, "--kind is tokens: must be hidden"),
        (None, {"head": 61}, "--head is 61: must be 60"),
        (another_vocabulary, {}, "--start .*: is a draft of .*, whose tokenizer is not this target's"),
        (another_width, {"head": None}, "--start .*: is a draft of .*, whose layers have other shapes"),
        (broken, {}, "--start .*: is no draft"),
        (shutil.rmtree, {}, "--start .*: is no draft"),
    ],
)
def test_what_a_draft_cannot_begin_as_is_refused(
    started: DistillOptions, change: Callable[[Path], None] | None, changes: dict[str, Any], words: str
) -> None:
    assert started.start is not None
    if change is not None:
        change(started.start)
    with pytest.raises(DistillError, match=words):
        run(dataclasses.replace(started, **changes), Watch())


def test_openings_are_kept_and_not_changed(options: DistillOptions, tmp_path: Path) -> None:
    lines = tmp_path / "openings.txt"
    lines.write_text("t7 t8 \n\nt9\n")
    options = dataclasses.replace(options, openings=lines)
    run(options, Watch("writing", 1))
    assert settings(options)["openings"] == ["t7 t8", "", "t9"]
    run(dataclasses.replace(options, openings=None), Watch("states", 1))
    written = np.load(options.out / "work/data/tokens.npy")
    assert (written[:3, :9] == written[0, :9]).all(), "three answers to one beginning"
    assert not (written[:4, :9] == written[0, :9]).all()
    lines.write_text("t7\n")
    with pytest.raises(DistillError, match=r"--openings: is not what .* was begun with"):
        run(options, Watch())


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\n \n", "must have beginnings"), (b"\xff\xfe", "codec"), (b"t7 " * 9, "line 1 has .* at most 8")],
)
def test_openings_that_cannot_be_are_refused(
    options: DistillOptions, tmp_path: Path, content: bytes, words: str
) -> None:
    lines = tmp_path / "openings.txt"
    lines.write_bytes(content)
    with pytest.raises(DistillError, match=f"--openings.*{words}"):
        run(dataclasses.replace(options, openings=lines), Watch())
    assert not (options.out / "work" / "settings.json").exists()
