"""The coordinator alone, with workers that answer at once: `python -m bench coordinator`.

Four processes are measured in turn: the coordinator and the relay that is its floor, with dense and with sparse rows.
Each has scripted workers in a process of their own, and this process is their client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from bench.load import Load
from bench.load_profile import Shares, shares
from bench.load_report import Window, tables
from bench.machine import commit, machine, versions
from paceline.v1 import coordinator_pb2_grpc
from services.cli.child import Child, Service
from services.cli.interrupt import run_or_exit
from services.common.rpc.channel import open_channel

_RESULTS = Path(__file__).with_name("results")
_SERVICE = "paceline.v1.CoordinatorService"
_COORDINATOR = "services.coordinator"
_PROFILED = "profiled coordinator"
_ROWS = ("sparse", "dense")
# Streams are broken off at the end of a window, and a late draft would change what a round is.
_COMMON = ("--listen", "127.0.0.1:0", "--shutdown-grace-s", "0", "--log-level", "warning")
_PATIENT = ("--draft-timeout-s", "60", "--max-gamma", "64")
_WARM_UP_S = 2.0
_PROFILED_STREAMS = 8
_PROFILED_S = 6.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured.

    Attributes:
        vocab_size: Entries of a dense row.
        support: Tokens of a sparse row.
        gamma: Drafts in a round.
        streams: Numbers of concurrent answers.
        repeats: Windows of each kind.
        window_s: Length of a window.
    """

    vocab_size: int
    support: int
    gamma: int
    streams: tuple[int, ...]
    repeats: int
    window_s: float


@click.command()
@click.option("--vocab-size", type=click.IntRange(512), default=152_064, show_default=True, help="Of dense rows.")
@click.option("--support", type=click.IntRange(8), default=64, show_default=True, help="Tokens of a sparse row.")
@click.option("--gamma", type=click.IntRange(0, 64), default=5, show_default=True, help="Drafts in a round.")
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 8, 64), show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="How often everything is run.")
@click.option("--window-s", type=click.FloatRange(0.5), default=3.0, show_default=True, help="Of one measurement.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>-coordinator.json"
)
@click.option("--markdown", is_flag=True, help="Print the tables as in docs/benchmarks.md.")
def main(out: Path | None, markdown: bool, **options: Any) -> None:
    """Count the rounds that a second of the coordinator's CPU time pays for, and say where it goes."""
    started = datetime.datetime.now(datetime.UTC)
    run_or_exit(_bench(Setup(**options), out or _RESULTS / f"{started:%Y-%m-%dT%H%M%SZ}-coordinator.json", markdown))


async def _bench(setup: Setup, path: Path, markdown: bool) -> None:
    about = {"commit": commit(), "machine": machine(), "versions": versions(), "settings": dataclasses.asdict(setup)}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            # All of them before the first channel: gRPC's threads and a fork do not go together.
            started = [each for rows in _ROWS for each in await _start(stack, setup, rows, Path(folder, rows))]
            loads = {(each.name, each.rows): await _load(stack, each, setup.gamma) for each in started}
            windows = await _measure(setup, loads)
            rounds = {rows: await _profile(loads[_PROFILED, rows], rows, setup.window_s) for rows in _ROWS}
        # A profile is written when its process ends.
        profiles = [shares(Path(folder, rows), rows, rounds[rows]) for rows in _ROWS]
    _write(path, about, windows, profiles)
    console = Console(highlight=False)
    for table in tables(windows, profiles):
        console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)
    click.echo(f"Written to {path}", err=True)


def _write(path: Path, about: dict[str, Any], windows: Sequence[Window], profiles: Sequence[Shares]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = {
        "windows": [dataclasses.asdict(each) for each in windows],
        "profiles": [dataclasses.asdict(each) for each in profiles],
    }
    path.write_text(json.dumps(about | lines, indent=1) + "\n", encoding="utf-8")


async def _measure(setup: Setup, loads: Mapping[tuple[str, str], Load]) -> list[Window]:
    """Run every window, interleaved: a slow minute of the machine falls on all of them."""
    windows = []
    for repeat in range(setup.repeats):
        for streams in setup.streams:
            for (name, rows), load in loads.items():
                if name == _PROFILED:
                    continue
                click.echo(f"repeat {repeat + 1}: {name}, {rows} rows, {streams} streams", err=True)
                windows.append(Window(name, rows, streams, await load.window(streams, _WARM_UP_S, setup.window_s)))
    return windows


async def _profile(load: Load, rows: str, window_s: float) -> int:
    """Return how many rounds were run under the profiler, which makes Python's own share look larger than it is."""
    click.echo(f"profile: {rows} rows, {_PROFILED_STREAMS} streams", err=True)
    return (await load.window(_PROFILED_STREAMS, _WARM_UP_S, max(_PROFILED_S, window_s))).rounds


@dataclass(frozen=True, slots=True)
class _Started:
    name: str
    rows: str
    address: str
    pid: int


async def _start(stack: contextlib.AsyncExitStack, setup: Setup, rows: str, profile: Path) -> list[_Started]:
    """Start scripted workers, and the three processes that use them."""
    support = setup.support if rows == "sparse" else 0
    script = ("--vocab-size", str(setup.vocab_size), "--support", str(support))
    worker = await _spawn(stack, "scripted", rows, "bench.scripted", (*script, *_COMMON))
    coordinator = ("--target", worker.address, "--draft", worker.address, *_PATIENT, *_COMMON)
    profiled = ("-o", str(profile), "-m", _COORDINATOR, *coordinator)
    return [
        await _spawn(stack, "coordinator", rows, _COORDINATOR, coordinator),
        await _spawn(stack, "relay", rows, "bench.relay", ("--worker", worker.address, *_COMMON)),
        await _spawn(stack, _PROFILED, rows, "cProfile", profiled),
    ]


async def _spawn(
    stack: contextlib.AsyncExitStack, name: str, rows: str, module: str, arguments: Sequence[str]
) -> _Started:
    """Start a process that ends with the stack."""
    before = {child.pid for child in psutil.Process().children()}
    child = await Child.spawn(Service(name, module, _SERVICE), arguments, _environment(), None)
    stack.push_async_callback(_stop, child)
    (pid,) = {child.pid for child in psutil.Process().children()} - before
    return _Started(name, rows, await child.address(), pid)


async def _stop(child: Child) -> None:
    child.signal(signal.SIGTERM)
    await child.close()


async def _load(stack: contextlib.AsyncExitStack, started: _Started, gamma: int) -> Load:
    channel = await stack.enter_async_context(
        open_channel(started.address, _SERVICE, max_message_mib=64, keepalive_s=10.0)
    )
    return Load(coordinator_pb2_grpc.CoordinatorServiceStub(channel), started.pid, gamma)


def _environment() -> dict[str, str]:
    """Return this environment without settings of the services or of OpenTelemetry: measured are the defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OTEL_"))}
