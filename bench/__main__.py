"""Measure: `python -m bench`, or `make bench`."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench import coordinator, passes, streams
from bench.machine import commit, machine, versions
from bench.measure import MODES, Question, Run, measure, warm_up
from bench.progress import run_progress
from bench.prompts import Prompt, load_prompts
from bench.report import setting, tables, write_results
from bench.start import start_and_load
from bench.summary import DEFAULT_DRAFT, TARGET_ALONE, summarize
from bench.systems import Service, System, Transformers
from paceline.v1 import coordinator_pb2_grpc
from services.cli.cluster import Cluster
from services.cli.interrupt import run_or_exit
from services.common.engine.model import LoadedModel
from services.common.rpc.channel import open_channel

_RESULTS = Path(__file__).with_name("results")
_PROMPTS = load_prompts()
_QUIET_LOAD = 0.5
_SERVICE = "paceline.v1.CoordinatorService"


@click.group(invoke_without_command=True)
@click.pass_context
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="How often everything is run.")
@click.option("--prompts", type=click.IntRange(1, len(_PROMPTS)), default=len(_PROMPTS), show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Of every answer.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>.json")
@click.option("--markdown", is_flag=True, help="Print the tables as in docs/benchmarks.md.")
def main(context: click.Context, repeats: int, prompts: int, tokens: int, out: Path | None, markdown: bool) -> None:
    """Compare the service with its target alone and with transformers' generate.

    Everything runs on this machine, one thing at a time and interleaved. Leave the machine alone meanwhile.
    """
    if context.invoked_subcommand is not None:
        return
    started = datetime.datetime.now(datetime.UTC)
    path = out or _RESULTS / f"{started:%Y-%m-%dT%H%M%SZ}.json"
    run_or_exit(_bench(_PROMPTS[:prompts], repeats, tokens, path, started, markdown))


async def _bench(
    prompts: Sequence[Prompt], repeats: int, tokens: int, path: Path, started: datetime.datetime, markdown: bool
) -> None:
    about: dict[str, Any] = {"started": f"{started:%Y-%m-%dT%H:%M:%SZ}", "commit": commit(), "machine": machine()}
    about["versions"] = versions()
    async with contextlib.AsyncExitStack() as stack:
        cluster, loaded, questions = await start_and_load(stack, prompts)
        begun_s = time.perf_counter()
        runs = await cluster.run(_runs(cluster, loaded, questions, repeats, tokens))
    about["settings"] = {
        "model": loaded.model_id,
        "dtype": loaded.dtype,
        "weights_hash": loaded.weights_hash,
        "prompts": len(prompts),
        "repeats": repeats,
        "tokens": tokens,
        "modes": dict(MODES),
        "took_s": round(time.perf_counter() - begun_s, 1),
    }
    summary = summarize(runs)
    write_results(path, about, summary, runs)
    console = Console(highlight=False)
    console.print(setting(about, path.name) + "\n", markup=False, soft_wrap=markdown)
    for table in tables(summary):
        console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)
    _warn(about["machine"])
    click.echo(f"Written to {path}", err=True)


def _warn(machine: dict[str, Any]) -> None:
    load, cores = machine["load_before"][0], machine["cores"]
    if load > _QUIET_LOAD * cores:
        click.echo(f"Not to be relied on: other work was running before (load {load} on {cores} cores)", err=True)


async def _runs(
    cluster: Cluster, loaded: LoadedModel, questions: Sequence[Question], repeats: int, tokens: int
) -> list[Run]:
    async with open_channel(cluster.address, _SERVICE, max_message_mib=64, keepalive_s=10.0) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        systems: list[System] = [
            Service(DEFAULT_DRAFT, stub, gamma=None),
            Service(TARGET_ALONE, stub, gamma=0),
            Transformers(loaded),
        ]
        await warm_up(systems, questions[0])
        with run_progress(repeats * len(questions) * len(MODES) * len(systems)) as on_step:
            return await measure(
                systems,
                questions,
                repeats=repeats,
                tokens=tokens,
                weights_hash=loaded.weights_hash,
                on_step=on_step,
            )


main.add_command(coordinator.main, "coordinator")
main.add_command(passes.main, "passes")
main.add_command(streams.main, "streams")

if __name__ == "__main__":
    main()
