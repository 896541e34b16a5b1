"""Several answers at a time from one target, without drafts: `python -m bench streams`.

Against transformers' greedy generate of one answer, interleaved.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from bench.machine import commit, machine, versions
from bench.prompts import load_prompts
from bench.report import Table
from bench.start import start_and_load
from bench.systems import Job, Transformers
from paceline.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2
from services.cli.interrupt import run_or_exit
from services.common.rpc.channel import open_channel

_RESULTS = Path(__file__).with_name("results")
_SERVICE = "paceline.v1.CoordinatorService"
_GREEDY = worker_pb2.SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0)


@dataclass(frozen=True, slots=True)
class Window:
    """What one run of concurrent answers gave.

    Attributes:
        streams: Answers at a time; 0 is transformers' generate of one.
        tokens_per_s: Of all, from the moment in which all had begun to the moment in which the first one ended.
        gap_p50_ms: Between two tokens of an answer, after its first.
        gap_p95_ms: The same.
        sessions_per_pass: Median of what the rounds say of the passes that they shared.
    """

    streams: int
    tokens_per_s: float
    gap_p50_ms: float = 0.0
    gap_p95_ms: float = 0.0
    sessions_per_pass: float = 0.0


@click.command()
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 8, 16), show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=64, show_default=True, help="Of every answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="How often everything is run.")
@click.option("--gamma", type=click.IntRange(0), default=0, show_default=True, help="Drafts in a round.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>-streams.json"
)
@click.option("--markdown", is_flag=True, help="Print the table as in docs/benchmarks.md.")
def main(streams: tuple[int, ...], tokens: int, repeats: int, gamma: int, out: Path | None, markdown: bool) -> None:
    """Count the tokens a second of concurrent greedy answers."""
    started = datetime.datetime.now(datetime.UTC)
    path = out or _RESULTS / f"{started:%Y-%m-%dT%H%M%SZ}-streams.json"
    about: dict[str, Any] = {"commit": commit(), "machine": machine(), "versions": versions()}
    about["settings"] = {"tokens": tokens, "repeats": repeats, "gamma": gamma, "temperature": 0}
    run_or_exit(_bench(streams, tokens, repeats, gamma, about, path, markdown))


async def _bench(
    streams: Sequence[int], tokens: int, repeats: int, gamma: int, about: dict[str, Any], path: Path, markdown: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster, loaded, questions = await start_and_load(stack, load_prompts())
        channel = await stack.enter_async_context(
            open_channel(cluster.address, _SERVICE, max_message_mib=64, keepalive_s=10.0)
        )
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        prompts = [question.ids for question in questions]
        transformers = Transformers(loaded)

        async def run() -> list[Window]:
            windows = []
            for repeat in range(-1, repeats):
                alone = await transformers.write(Job(prompts[0], 0.0, tokens, seed=0))
                round_of = [Window(0, tokens / alone.wall_s)]
                for count in streams:
                    click.echo(f"repeat {repeat + 1}: {count} streams", err=True)
                    round_of.append(await _window(stub, prompts, count, tokens, gamma))
                # The first round warms up.
                windows += round_of if repeat >= 0 else []
            return windows

        windows = await cluster.run(run())
    _write(path, about, windows)
    table = _table(windows)
    console = Console(highlight=False)
    console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)
    click.echo(f"Written to {path}", err=True)


def _write(path: Path, about: dict[str, Any], windows: Sequence[Window]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = {"windows": [dataclasses.asdict(each) for each in windows]}
    path.write_text(json.dumps(about | lines, indent=1) + "\n", encoding="utf-8")


async def _window(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
    prompts: Sequence[Sequence[int]],
    count: int,
    tokens: int,
    gamma: int,
) -> Window:
    async def answer(prompt: Sequence[int]) -> tuple[list[float], list[int]]:
        request = coordinator_pb2.GenerateRequest(
            tokens=coordinator_pb2.TokenPrompt(ids=prompt),
            sampling=_GREEDY,
            max_tokens=tokens,
            stop=coordinator_pb2.StopConditions(ignore_eos=True),
            gamma=gamma,
        )
        arrived_s: list[float] = []
        shared: list[int] = []
        async for response in stub.Generate(request):
            if response.HasField("chunk"):
                arrived_s += [time.perf_counter()] * len(response.chunk.tokens)
            else:
                shared = [each.target.batch_size for each in response.result.speculation.per_round]
        return arrived_s, shared

    answers = await asyncio.gather(*(answer(prompts[i % len(prompts)]) for i in range(count)))
    begun_s, ended_s = max(times[0] for times, _ in answers), min(times[-1] for times, _ in answers)
    inside = sum(begun_s < at <= ended_s for times, _ in answers for at in times)
    gaps_ms = np.concatenate([np.diff(times) for times, _ in answers]) * 1e3
    return Window(
        streams=count,
        tokens_per_s=inside / (ended_s - begun_s),
        gap_p50_ms=float(np.quantile(gaps_ms, 0.5)),
        gap_p95_ms=float(np.quantile(gaps_ms, 0.95)),
        sessions_per_pass=float(np.median([size for _, shared in answers for size in shared[1:]])),
    )


def _table(windows: Sequence[Window]) -> Table:
    alone = np.array([each.tokens_per_s for each in windows if each.streams == 0])
    rows = []
    for streams in dict.fromkeys(each.streams for each in windows):
        mine = [each for each in windows if each.streams == streams]
        speeds = np.array([each.tokens_per_s for each in mine])
        gaps = [f"{np.median([getattr(each, name) for each in mine]):.0f}" for name in ("gap_p50_ms", "gap_p95_ms")]
        batch = f"{np.median([each.sessions_per_pass for each in mine]):.0f}"
        ratios = speeds / alone
        rows.append(
            (
                "transformers' generate" if streams == 0 else f"{streams} stream" + "s" * (streams > 1),
                *(f"{np.median(speeds):.1f}", f"{np.median(ratios):.2f}", f"{ratios.min():.2f} to {ratios.max():.2f}"),
                *(["", "", ""] if streams == 0 else [*gaps, batch]),
            )
        )
    headers = ("", "tokens/s", "to generate", "least to most", "between tokens p50 ms", "p95 ms", "sessions a pass")
    return Table("Concurrent greedy answers", headers, tuple(rows), labels=1)
