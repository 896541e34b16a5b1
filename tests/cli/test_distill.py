"""`paceline distill` as a person runs it: Ctrl-C, going on, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Paceline
from tests.distill.teaching import texts
from tests.support.models import make_tiny_llama

_PACELINE = [sys.executable, "-c", "from services.cli.main import main; main()"]


def interrupted(arguments: list[str], after: str) -> tuple[int, str, str]:
    """Run until standard error says `after`, then press Ctrl-C; return exit code, output, and errors."""
    process = subprocess.Popen(
        [*_PACELINE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith(after):
                process.send_signal(signal.SIGINT)
                break
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, "".join(said) + errors


@pytest.mark.timeout(900)
def test_ctrl_c_saves_and_the_command_that_it_prints_goes_on(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target")
    given = texts(tmp_path / "given.npy", 20)
    out = tmp_path / "out"
    arguments = ["distill", "--target", target, "--out", out, "--texts", given, "--threads", "1", "--device", "cpu"]
    code, printed, errors = interrupted([str(a) for a in arguments], "training")
    assert code == 130, errors
    assert "alpha by step" in printed
    (again,) = [line for line in errors.splitlines() if line.startswith("To go on: ")]
    words = shlex.split(again.removeprefix("To go on: "))
    assert words[:2] == ["paceline", "distill"]
    before = [json.loads(line)["updates"] for line in (out / "log.jsonl").read_text().splitlines()]
    code, _, errors = interrupted(words[1:], "training")
    assert code == 130, errors
    after = [json.loads(line)["updates"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before
    assert after[-1] > before[-1] >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hours", "0"], "0.0 is not in the range x>0"),
        (["--layers", "9"], "9 is not in the range 1<=x<=4"),
        (["--kind", "magic"], "'magic' is not one of"),
        (["--texts", "none.npy"], "'none.npy' does not exist"),
        (["--target", "/no/such/folder"], "There is no folder /no/such/folder"),
    ],
)
def test_bad_options_are_named(paceline: Paceline, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = paceline("distill", "--out", tmp_path / "out", *arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


def test_without_torch_it_says_what_to_install(
    paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def absent(name: str, *rest: Any) -> Any:
        return None if name == "torch" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    result = paceline("distill", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "pip install 'paceline[worker]'" in result.output


def test_the_command_line_itself_imports_no_torch() -> None:
    code = "import sys; from services.cli.distill import distill; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
