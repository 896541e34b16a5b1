"""The budget of the KV pool: how it is written, what it holds, and what is said where it is too small."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from services.common.engine import memory
from services.common.engine.admission import AdmissionLimits
from services.common.engine.engine import Engine
from services.common.engine.memory import free_memory, kv_budget, parse_memory
from services.common.engine.options import EngineOptions
from services.common.specdec.errors import StartupError
from tests.support.engines import StartEngine, evaluate, load
from tests.support.models import make_tiny_llama

CPU = torch.device("cpu")
# Two layers, keys and values, two heads of eight numbers in float32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * GIB),
        ("2gib", 2 * GIB),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("800MB", 800_000_000),
        ("64MiB", 64 * 2**20),
        ("3KiB", 3072),
        ("3kB", 3000),
        ("1GB", 10**9),
        ("4096", 4096),
        ("25%", 0.25),
        ("100 %", 1.0),
        ("0.5%", 0.005),
    ],
)
def test_sizes_and_shares(text: str, expected: float) -> None:
    parsed = parse_memory(text)
    assert parsed == expected
    assert isinstance(parsed, float) == ("%" in text)


@pytest.mark.parametrize("text", ["", "GiB", "2 giga", "-1GiB", "2TiB", "1e9", "25%%", "2GiB extra"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as 2GiB or 800MB, or a share of the free memory"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["0%", "101%", "0.0%"])
def test_a_share_is_above_nothing_and_at_most_all(text: str) -> None:
    with pytest.raises(ValueError, match="above 0% and at most 100%"):
        parse_memory(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what is free, and the control group's files."""

    def install(available: int, **files: str) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
        monkeypatch.setattr(memory, "_CONTROL_GROUP", tmp_path)
        for name, text in files.items():
            (tmp_path / f"memory.{name}").write_text(text)

    return install


def test_what_is_free_without_a_control_group(machine: Callable[..., None]) -> None:
    machine(8 * GIB)
    assert free_memory(CPU) == 8 * GIB


def test_what_is_free_within_a_control_group(machine: Callable[..., None]) -> None:
    stat = f"anon 5\ninactive_anon 7\ninactive_file {GIB}\nactive_file 3\n"
    machine(8 * GIB, max=f"{4 * GIB}\n", current=f"{2 * GIB}\n", stat=stat)
    assert free_memory(CPU) == 3 * GIB, "pages of files that nobody uses count as free"
    machine(GIB)
    assert free_memory(CPU) == GIB, "never more than the machine has"


def test_a_control_group_without_a_limit(machine: Callable[..., None]) -> None:
    machine(8 * GIB, max="max\n", current="12345\n", stat="")
    assert free_memory(CPU) == 8 * GIB


def test_budgets(machine: Callable[..., None]) -> None:
    machine(8 * GIB)
    assert kv_budget("25%", CPU) == 2 * GIB
    assert kv_budget("3GiB", CPU) == 3 * GIB
    with pytest.raises(StartupError) as caught:
        kv_budget("9GiB", CPU)
    assert str(caught.value) == "--kv-cache-memory is 9GiB: only 8192 MiB are free on cpu after loading the model"


def test_a_budget_that_is_no_amount_is_told_by_its_flag() -> None:
    # Of the right form, as the settings check it.
    with pytest.raises(StartupError, match=r"^--kv-cache-memory is 200%: a share must be above 0% and at most 100%$"):
        kv_budget("200%", CPU)


def test_too_little_for_anybody_is_refused(llama_folder: Path, tmp_path: Path, machine: Callable[..., None]) -> None:
    with pytest.raises(StartupError) as caught:
        Engine(load(llama_folder), EngineOptions(kv_cache_memory=str(256 * TOKEN_BYTES - 1)))
    assert str(caught.value) == ("--kv-cache-memory is 65535: it holds 255 tokens of 256 bytes, must hold at least 256")
    # A model of a short context needs no more than that.
    short = make_tiny_llama(tmp_path / "short", context=40)
    with pytest.raises(StartupError, match="it holds 39 tokens of 256 bytes, must hold at least 40"):
        Engine(load(short), EngineOptions(kv_cache_memory=str(40 * TOKEN_BYTES - 1)))
    machine(GIB)
    with pytest.raises(StartupError, match="--kv-cache-memory is 2GiB: only 1024 MiB are free on cpu"):
        Engine(load(llama_folder), EngineOptions(kv_cache_memory="2GiB"))


async def test_a_small_pool_limits_the_context_and_says_so(
    llama_folder: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = await start_engine(llama_folder, kv_cache_memory=str(300 * TOKEN_BYTES))
    assert engine.context_length == engine.memory.size == 300
    assert (
        "--kv-cache-memory 76800 holds no session at the model's context of 512: limited to 300 tokens" in caplog.text
    )
    session = await engine.open(300)
    assert (await evaluate(session, 0, [5] * 300)).shape[0] == 1


async def test_the_sizes_are_logged(
    llama_folder: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = await start_engine(llama_folder, kv_cache_memory="1MiB")
    assert engine.context_length == 512
    assert (
        "KV cache: 1.0 MiB, 256 bytes a token, 4096 tokens: 8 sessions at the full context of 512, at most 64"
        in caplog.text
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_no_more_is_allocated_than_all_sessions_could_use(llama_folder: Path, start_engine: StartEngine) -> None:
    engine = await start_engine(llama_folder, kv_cache_memory="64MiB", admission=AdmissionLimits(sessions=3))
    assert engine.memory.size == 3 * 512


async def test_bfloat16_takes_half(
    llama_folder: Path, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = await start_engine(llama_folder, "bfloat16", kv_cache_memory="1MiB")
    assert engine.memory.size == 8192
    assert "128 bytes a token" in caplog.text
