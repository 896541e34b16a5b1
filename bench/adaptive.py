"""Gamma chosen by the service against each fixed one, by category and streams: `python -m bench adaptive`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from bench.adaptive_report import ADAPTIVE
from bench.finish import finish
from bench.gammas_report import name
from bench.measure import MODES, Block, Question, job
from bench.prompts import CATEGORIES, Prompt
from bench.record import Place
from bench.run import Options, about, options, run
from bench.start import connect, load, questions, start
from bench.store import Store
from bench.systems import Service
from services.cli.interrupt import run_or_exit

TABLE = "adaptive"


@click.command()
@options(prompts=24, tokens=64, repeats=5)
@click.option("--gamma", "gammas", type=click.IntRange(1, 16), multiple=True, help="Fixed ones. Default: 1 to 8.")
@click.option("--streams", type=click.IntRange(1), multiple=True, help="Answers at a time. Default: 1, 4 and 8.")
@click.option("--category", "categories", type=click.Choice(CATEGORIES), multiple=True, help="Default: all.")
def main(
    options: Options,
    *,
    gammas: tuple[int, ...],
    streams: tuple[int, ...],
    categories: tuple[str, ...],
) -> None:
    """Hold the gamma that the service chooses against every fixed one."""
    path = options.path(TABLE)
    kinds = options.choose(categories, CATEGORIES[:2], CATEGORIES)
    asked = options.asked(kinds, len(kinds), None)
    settings: dict[str, Any] = {
        "prompts": [prompt.question_id for prompt in asked],
        "tokens": options.choose(options.tokens, 16, 64),
        "repeats": options.choose(options.repeats, 1, 5),
        "modes": list(options.modes or MODES),
        "gammas": [0, *sorted(options.choose(gammas, (1, 4), range(1, 9)))],
        "streams": list(options.choose(streams, (1, 4), (1, 4, 8))),
    }
    run_or_exit(_bench(asked, options, settings, path))
    finish(path, markdown=options.markdown, figures=options.figures)


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster = await start(stack, options.services())
        stub = await connect(stack, cluster.address)
        loaded = load(options.target)
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        systems = [
            Service(ADAPTIVE, stub, gamma=None),
            *(Service(name(gamma), stub, gamma) for gamma in settings["gammas"]),
        ]
        asked_as_ids = questions(asked, options.target)
        await cluster.run(
            run(store, systems, list(_blocks(asked_as_ids, settings)), asked_as_ids[0], loaded.weights_hash)
        )


def _blocks(asked: Sequence[Question], settings: dict[str, Any]) -> Iterator[Block]:
    """Yield one block for each repeat, number of streams, category and mode: its prompts in turn, at the same time."""
    kinds = list(dict.fromkeys(question.category for question in asked))
    for repeat in range(settings["repeats"]):
        for streams in settings["streams"]:
            for kind in kinds:
                mine = [question for question in asked if question.category == kind]
                for mode in settings["modes"]:
                    # Another repeat begins with the next prompt, so that one stream sees them all.
                    chosen = [mine[(repeat + i) % len(mine)] for i in range(streams)]
                    jobs = tuple(job(each, mode, settings["tokens"], repeat) for each in chosen)
                    yield Block(Place(mode, repeat, kind, kind, streams), jobs)
