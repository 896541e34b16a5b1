"""Tracing of all requests, of none, and none at all: `python -m bench tracing`.

Sampled and unsampled requests go to the same processes, as the caller's traceparent says: processes that are alike
differ by several parts in a hundred all the same, and no number of repeats shows that. Without tracing is a second
coordinator before the same workers, which begin no spans for requests that are not sampled. Spans go to a collector in
this process, which reads none of them. Gamma is fixed and nothing runs ahead, so that all do the same work.
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
from bench.start import connect, load, questions, start, start_beside
from bench.store import Store
from bench.systems import Service
from bench.tracing_report import OFF, SAMPLED, UNSAMPLED
from services.cli.interrupt import run_or_exit

TABLE = "tracing"
_GAMMA = 4
_ALONE = ("--overlap", "off")


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


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    sink = Sink()
    async with contextlib.AsyncExitStack() as stack:
        exported = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": sink.endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "16384"}
        cluster = await start(stack, options.services(coordinator=_ALONE), "", exported)
        untraced = await start_beside(stack, cluster, _ALONE)
        # After the last fork: gRPC's threads do not go together with one.
        stack.enter_context(sink)
        traced = await connect(stack, cluster.address)
        systems = [
            Service(OFF, await connect(stack, untraced), _GAMMA),
            Service(UNSAMPLED, traced, _GAMMA, sampled=False),
            Service(SAMPLED, traced, _GAMMA, sampled=True),
        ]
        loaded = load(options.target)
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        asked_as_ids = questions(asked, options.target)
        planned = list(_blocks(asked_as_ids, settings))
        await cluster.run(run(store, systems, planned, asked_as_ids[0], loaded.weights_hash))
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
