"""Drafting that runs ahead against drafting in turn: `python -m bench overlap`.

Real processes: the coordinator, and a draft and a target that sleep for a known time, so that neither takes the other's
cores. Both ways are run in turn, at several shares c of a draft step in a pass and at several alphas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from bench.machine import commit, machine, versions
from bench.report import Table
from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from services.cli.child import Child, Service
from services.cli.interrupt import run_or_exit
from services.common.rpc.channel import open_channel

_RESULTS = Path(__file__).with_name("results")
_SERVICE = "paceline.v1.CoordinatorService"
_COMMON = ("--listen", "127.0.0.1:0", "--shutdown-grace-s", "0", "--log-level", "warning")
_PROMPT = (1, 2, 3)
_WARM_UP_TOKENS = 800
_MODES = ("off", "on", "auto")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured.

    Attributes:
        shares: Draft steps, in passes of the target.
        alphas: Shares of drafts kept.
        gamma: Drafts in a round.
        pass_ms: Of the target.
        tokens: Of an answer.
        repeats: Answers of each kind.
    """

    shares: tuple[float, ...]
    alphas: tuple[float, ...]
    gamma: int
    pass_ms: float
    tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers of one kind.

    Attributes:
        share: Draft step, in passes of the target.
        mode: Of --overlap.
        alpha: Accepted of those tested.
        ms_per_token: Each answer's, its first round left out.
        kept_ms: Rounds that kept all their drafts; where drafting ran ahead, those that began with drafts made so.
        ran_ahead: Share of the rounds.
    """

    share: float
    mode: str
    alpha: float
    ms_per_token: tuple[float, ...]
    kept_ms: tuple[float, ...]
    ran_ahead: float


@click.command()
@click.option("--shares", type=click.FloatRange(0.0), multiple=True, default=(0.1, 0.2, 0.3), show_default=True)
@click.option(
    "--alphas", type=click.FloatRange(0.05, 1), multiple=True, default=(0.3, 0.5, 0.7, 0.9), show_default=True
)
@click.option("--gamma", type=click.IntRange(1, 16), default=4, show_default=True, help="Drafts in a round.")
@click.option("--pass-ms", type=click.FloatRange(1), default=50.0, show_default=True, help="A pass of the target.")
@click.option("--tokens", type=click.IntRange(8), default=96, show_default=True, help="Of an answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Answers of each kind.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>-overlap.json"
)
@click.option("--markdown", is_flag=True, help="Print the table as in docs/benchmarks.md.")
def main(out: Path | None, markdown: bool, **options: Any) -> None:
    """Time rounds and tokens with drafting that runs ahead and without, over workers of known speed."""
    started = datetime.datetime.now(datetime.UTC)
    run_or_exit(_bench(Setup(**options), out or _RESULTS / f"{started:%Y-%m-%dT%H%M%SZ}-overlap.json", markdown))


async def _bench(setup: Setup, path: Path, markdown: bool) -> None:
    about = {"commit": commit(), "machine": machine(), "versions": versions(), "settings": dataclasses.asdict(setup)}
    measured: list[Measured] = []
    for share, alpha in itertools.product(setup.shares, setup.alphas):
        click.echo(f"draft step {share:g} of a pass, alpha about {alpha:g}", err=True)
        measured += await _measure(setup, share, alpha)
        # As it goes: a run that is stopped has measured something.
        _write(path, about, measured)
    shown = table(setup, measured)
    Console(highlight=False).print(
        shown.markdown() + "\n" if markdown else shown.rich(), markup=False, soft_wrap=markdown
    )
    click.echo(f"Written to {path}", err=True)


def _write(path: Path, about: dict[str, Any], measured: Sequence[Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = {"measured": [dataclasses.asdict(each) for each in measured]}
    path.write_text(json.dumps(about | lines, indent=1) + "\n", encoding="utf-8")


async def _measure(setup: Setup, share: float, alpha: float) -> list[Measured]:
    """Run the answers of one pair of workers, the ways to draft in turn."""
    pace = ("--alpha", str(alpha), "--step-ms", str(share * setup.pass_ms), "--pass-ms", str(setup.pass_ms))
    async with contextlib.AsyncExitStack() as stack:
        draft, target = [await _spawn(stack, "bench.paced", (*pace, *_COMMON)) for _ in range(2)]
        workers = ("--target", target, "--draft", draft, *_COMMON)
        # All of the processes before the first channel: gRPC's threads and a fork do not go together.
        addresses = {
            mode: await _spawn(stack, "services.coordinator", ("--overlap", mode, *workers)) for mode in _MODES
        }
        stubs = {}
        for mode, address in addresses.items():
            channel = open_channel(address, _SERVICE, max_message_mib=16, keepalive_s=10.0)
            stubs[mode] = coordinator_pb2_grpc.CoordinatorServiceStub(await stack.enter_async_context(channel))
        got: dict[str, list[pb.GenerateResult]] = {mode: [] for mode in _MODES}
        for mode, stub in stubs.items():
            # Auto takes two trials of each way to find out.
            await _answer(stub, setup, _WARM_UP_TOKENS if mode == "auto" else setup.tokens)
        for _ in range(setup.repeats):
            for mode, stub in stubs.items():
                got[mode].append(await _answer(stub, setup, setup.tokens))
    return [summary(share, mode, results) for mode, results in got.items()]


async def _spawn(stack: contextlib.AsyncExitStack, module: str, arguments: Sequence[str]) -> str:
    """Start a process that ends with the stack and return its address."""
    # Without settings of the services or of OpenTelemetry: measured are the defaults.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OTEL_"))}
    child = await Child.spawn(Service(module, module, _SERVICE), arguments, environment, None)

    async def stop() -> None:
        child.signal(signal.SIGTERM)
        await child.close()

    stack.push_async_callback(stop)
    return await child.address()


async def _answer(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, setup: Setup, tokens: int
) -> pb.GenerateResult:
    request = pb.GenerateRequest(
        tokens=pb.TokenPrompt(ids=_PROMPT),
        gamma=setup.gamma,
        max_tokens=tokens,
        stop=pb.StopConditions(ignore_eos=True),
    )
    result: pb.GenerateResult | None = None
    async for reply in stub.Generate(request, wait_for_ready=True):
        if reply.HasField("result"):
            result = reply.result
    assert result is not None, "the stream ended without a result"
    return result


def summary(share: float, mode: str, results: Sequence[pb.GenerateResult]) -> Measured:
    """Return the figures of one kind of answers."""
    rounds = [list(result.speculation.per_round) for result in results]
    every = [row for each in rounds for row in each]
    kept = [row.total_ms for each in rounds for pair in itertools.pairwise(each) if (row := _kept(*pair)) is not None]
    return Measured(
        share=share,
        mode=mode,
        alpha=sum(row.accepted for row in every) / max(1, sum(row.tested for row in every)),
        ms_per_token=tuple(_ms_per_token(each[1:]) for each in rounds),
        kept_ms=tuple(kept),
        ran_ahead=sum(row.ran_ahead for row in every) / len(every),
    )


def _kept(before: pb.RoundStats, row: pb.RoundStats) -> pb.RoundStats | None:
    """Return a round if it kept all its drafts and, where drafting runs ahead, had them from there."""
    had_them = before.accepted > before.gamma or not row.ran_ahead
    return row if had_them and row.gamma and row.proposed >= row.gamma and row.accepted >= row.gamma else None


def _ms_per_token(rounds: Sequence[pb.RoundStats]) -> float:
    return sum(row.total_ms for row in rounds) / sum(row.emitted for row in rounds)


def table(setup: Setup, measured: Iterable[Measured]) -> Table:
    """Return a row for each share and alpha: rounds that kept everything, and the whole."""
    rows = []
    for off, on, auto in zip(*[iter(measured)] * len(_MODES), strict=True):
        step_ms = off.share * setup.pass_ms
        sum_ms, longer_ms = setup.pass_ms + setup.gamma * step_ms, max(setup.pass_ms, (setup.gamma + 1) * step_ms)
        gain = [np.median(np.array(off.ms_per_token) / np.array(each.ms_per_token)) for each in (on, auto)]
        rows.append(
            (
                *(f"{off.share:g}", f"{off.alpha:.2f}"),
                *(f"{sum_ms:.0f}", _median(off.kept_ms), f"{longer_ms:.0f}", _median(on.kept_ms)),
                *(f"{predicted(setup, off.share, off.alpha):.2f}", f"{gain[0]:.2f}", f"{gain[1]:.2f}"),
                f"{auto.ran_ahead:.0%}",
            )
        )
    headers = (
        *("c", "alpha", "in turn: sum, ms", "kept round, ms", "ahead: longer of the two, ms", "kept round, ms"),
        *("speed-up by formula", "measured", "auto", "auto: rounds ahead"),
    )
    title = f"Drafting ahead of a pass of {setup.pass_ms:g} ms, gamma {setup.gamma}"
    return Table(title, headers, tuple(rows), labels=0)


def predicted(setup: Setup, share: float, alpha: float) -> float:
    """Return how many times as fast answers are, by what a cycle costs on average.

    A cycle is alike in tokens either way. In turn it is a pass and gamma steps. Ahead, with probability
    alpha^(gamma + 1), all is kept, and it is the longer of a pass and gamma + 1 steps; else a pass and gamma steps, and
    half a step until the draft leaves what it was doing.
    """
    pass_ms, step_ms = setup.pass_ms, share * setup.pass_ms
    in_turn = pass_ms + setup.gamma * step_ms
    kept = alpha ** (setup.gamma + 1)
    ahead = kept * max(pass_ms, (setup.gamma + 1) * step_ms) + (1 - kept) * (in_turn + step_ms / 2)
    return float(in_turn / ahead)


def _median(values: Sequence[float]) -> str:
    return f"{np.median(values):.1f}" if values else "none"
