"""Tracing of all requests, of none, and none at all: `python -m bench tracing`.

Three sets of the services, alike but for their OTEL_ variables, asked in turn. Spans go to a collector in this process,
which reads none of them. Gamma is fixed and nothing runs ahead, so that all three do the same work.

Processes that are alike differ all the same, by a tenth on a small machine (where their memory lies), and no number of
repeats within a run shows that: several runs do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from bench.finish import finish
from bench.measure import Block, Question, job
from bench.prompts import CATEGORIES, Prompt
from bench.record import Place
from bench.run import Options, about, options, run
from bench.sink import Sink
from bench.start import connect, load, questions, start
from bench.store import Store
from bench.systems import Service
from bench.tracing_report import OFF, SAMPLED, UNSAMPLED
from services.cli.interrupt import run_or_exit

TABLE = "tracing"
_GAMMA = 4
# Three of each are in memory at once.
_CACHE = ("--kv-cache-memory", "512MiB")


@click.command()
@options(prompts=4, tokens=48, repeats=8)
@click.option("--streams", type=click.IntRange(1), multiple=True, help="Answers at a time. Default: 1 and 4.")
def main(options: Options, *, streams: tuple[int, ...]) -> None:
    """Time answers with every request traced, with tracing on and none sampled, and without tracing."""
    # One after the other is started, and gRPC would say of each that it was running when this process forked.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    path = options.path(TABLE)
    asked = options.asked(CATEGORIES, 2, 4)
    settings: dict[str, Any] = {
        "prompts": [prompt.question_id for prompt in asked],
        "tokens": options.choose(options.tokens, 32, 48),
        "repeats": options.choose(options.repeats, 2, 8),
        "modes": list(options.modes or ("greedy",)),
        "streams": list(options.choose(streams, (1, 4), (1, 4))),
        "gamma": _GAMMA,
    }
    run_or_exit(_bench(asked, options, settings, path))
    finish(path, markdown=options.markdown, figures=options.figures)


def environments(endpoint: str) -> dict[str, dict[str, str]]:
    """Return the variables of each set of services, with a collector at an endpoint."""
    exported = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "16384"}
    none = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    return {OFF: {}, UNSAMPLED: exported | none, SAMPLED: exported}


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    sink = Sink()
    async with contextlib.AsyncExitStack() as stack:
        arguments = options.services(coordinator=("--overlap", "off"), draft=_CACHE, target=_CACHE)
        clusters = {
            name: await start(stack, arguments, f"tracing {name}", variables)
            for name, variables in environments(sink.endpoint).items()
        }
        # After the last fork: gRPC's threads do not go together with one.
        stack.enter_context(sink)
        systems = [Service(name, await connect(stack, cluster), _GAMMA) for name, cluster in clusters.items()]
        loaded = load(options.target)
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        asked_as_ids = questions(asked, options.target)
        planned = list(_blocks(asked_as_ids, settings))
        work = run(store, systems, planned, asked_as_ids[0], loaded.weights_hash)
        for cluster in clusters.values():
            work = cluster.run(work)
        await work
        if not sink.received:
            raise click.ClickException("no span has come: what was measured is no tracing")
        click.echo(f"{sink.received / 1e6:.1f} MB of spans", err=True)


def _blocks(asked: Sequence[Question], settings: dict[str, Any]) -> Iterator[Block]:
    """Yield one block for each repeat, number of streams, prompt and mode: that prompt and those after it at a time."""
    for repeat in range(settings["repeats"]):
        for streams in settings["streams"]:
            for at, first in enumerate(asked):
                chosen = [asked[(at + i) % len(asked)] for i in range(streams)]
                for mode in settings["modes"]:
                    place = Place(mode, repeat, str(first.question_id), first.category, streams)
                    yield Block(place, tuple(job(each, mode, settings["tokens"], repeat) for each in chosen))
