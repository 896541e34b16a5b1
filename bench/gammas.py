"""Fixed gamma from 1 to 8, against the formula: `python -m bench gammas`.

The model drafts alone (the worker looks nothing up unless told to), and does not run ahead: the formula knows neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.finish import finish
from bench.gammas_report import name
from bench.measure import MODES, blocks
from bench.prompts import CATEGORIES, Prompt
from bench.run import Options, about, options, run
from bench.start import connect, load, questions, start
from bench.store import Store
from bench.systems import Service
from services.cli.interrupt import run_or_exit

TABLE = "gammas"


@click.command()
@options(prompts=13, tokens=96, repeats=3)
@click.option("--gamma", "gammas", type=click.IntRange(1, 16), multiple=True, help="Default: 1 to 8.")
def main(
    options: Options,
    *,
    gammas: tuple[int, ...],
) -> None:
    """Hold the speed-up at each gamma against the formula's with measured alpha, c and r."""
    path = options.path(TABLE)
    asked = options.asked(CATEGORIES, 2, 13)
    settings: dict[str, Any] = {
        "prompts": [prompt.question_id for prompt in asked],
        "tokens": options.choose(options.tokens, 32, 96),
        "repeats": options.choose(options.repeats, 1, 3),
        "modes": list(options.modes or MODES),
        "gammas": [0, *sorted(options.choose(gammas, (1, 4), range(1, 9)))],
    }
    run_or_exit(_bench(asked, options, settings, path))
    finish(path, markdown=options.markdown, figures=options.figures)


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster = await start(stack, options.services(coordinator=("--overlap", "off"), draft=("--ngram-first", "0")))
        stub = await connect(stack, cluster.address)
        loaded = load(options.target)
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        systems = [Service(name(gamma), stub, gamma) for gamma in settings["gammas"]]
        asked_as_ids = questions(asked, options.target)
        planned = list(blocks(asked_as_ids, settings["modes"], settings["repeats"], settings["tokens"]))
        await cluster.run(run(store, systems, planned, asked_as_ids[0], loaded.weights_hash))
