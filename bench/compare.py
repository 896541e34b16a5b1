"""The full comparison: this service, its target alone, and what people use instead. `python -m bench compare`.

All systems have the same weights, dtype, threads and prompts, and run one at a time, interleaved. Nothing is reused
from one answer to the next: the service's prefix reuse is off here, for transformers' generate has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.assistants import assistant
from bench.compare_report import ASSISTED, GENERATE, LOOKUP, OURS, TARGET_ALONE
from bench.finish import finish
from bench.measure import MODES, blocks
from bench.prompts import CATEGORIES, Prompt
from bench.run import Options, about, options, run
from bench.start import connect, load, questions, start
from bench.store import Store
from bench.systems import Service, System, Transformers
from services.cli.interrupt import run_or_exit

TABLE = "compare"


@click.command()
@options(prompts=24, tokens=128, repeats=3)
@click.option(
    "--assistant",
    "choice",
    default="",
    help="A draft for transformers, or early-exit:LAYERS. Default: --draft if it can run it",
)
@click.option("--assistant-tokens", type=click.IntRange(1), help="Of a round. Default: transformers' own choice.")
@click.option(
    "--lookup-tokens", type=click.IntRange(1), default=10, show_default=True, help="Of prompt lookup's rounds."
)
def main(
    options: Options,
    *,
    choice: str,
    assistant_tokens: int | None,
    lookup_tokens: int,
) -> None:
    """Compare the service with its target alone and with transformers.

    Everything runs on this machine, one thing at a time and interleaved. Leave the machine alone meanwhile.
    """
    path = options.path(TABLE)
    asked = options.asked(CATEGORIES, 2, 24)
    settings: dict[str, Any] = {
        "prompts": [prompt.question_id for prompt in asked],
        "tokens": options.choose(options.tokens, 32, 128),
        "repeats": options.choose(options.repeats, 1, 3),
        "modes": list(options.modes or MODES),
        "assistant": choice,
        "assistant_tokens": assistant_tokens,
        "lookup_tokens": lookup_tokens,
    }
    run_or_exit(_bench(asked, options, settings, path))
    finish(path, markdown=options.markdown, figures=options.figures)


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cluster = await start(stack, options.services())
        stub = await connect(stack, cluster.address)
        loaded = load(options.target)
        systems: list[System] = [
            Service(OURS, stub, gamma=None),
            Service(TARGET_ALONE, stub, gamma=0),
            Transformers(loaded, GENERATE),
            Transformers(loaded, LOOKUP, {"prompt_lookup_num_tokens": settings["lookup_tokens"]}),
        ]
        if settings["assistant"] or options.draft:
            chosen = assistant(settings["assistant"], options.draft, loaded, settings["assistant_tokens"])
            settings["assistant"], arguments = chosen
            systems.append(Transformers(loaded, ASSISTED, arguments))
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        asked_as_ids = questions(asked, options.target)
        planned = list(blocks(asked_as_ids, settings["modes"], settings["repeats"], settings["tokens"]))
        await cluster.run(run(store, systems, planned, asked_as_ids[0], loaded.weights_hash))
