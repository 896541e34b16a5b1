"""What thin rows, truncated drafts and coupled verification save and cost: `python -m bench wire`.

Each kind has three services of its own, all on this machine; one computes at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench.finish import finish
from bench.measure import blocks
from bench.prompts import CATEGORIES, Prompt
from bench.run import Options, about, options, run
from bench.start import connect, load, questions, start
from bench.store import Store
from bench.systems import Service
from bench.wire_report import COUPLED, DENSE, THIN, top_k
from paceline.v1 import worker_pb2
from services.cli.interrupt import run_or_exit

TABLE = "wire"
# Several targets at a time; the default share of the memory would be taken by each.
_KV_MEMORY = ("--kv-cache-memory", "512MiB")


@click.command()
@options(prompts=13, tokens=96, repeats=3)
@click.option("--gamma", type=click.IntRange(1, 16), default=4, show_default=True, help="Drafts in a round.")
@click.option("--top-k", "top_ks", type=click.IntRange(1), multiple=True, help="Of q. Default: 64, 128 and 256.")
def main(options: Options, *, gamma: int, top_ks: tuple[int, ...]) -> None:
    """Count bytes a round and alpha: rows thin or dense, q whole or truncated, rule TOKEN or COUPLED."""
    # One after the other is started, and gRPC would say of each that it was running when this process forked.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    path = options.path(TABLE)
    asked = options.asked(CATEGORIES, 2, 13)
    settings: dict[str, Any] = {
        "prompts": [prompt.question_id for prompt in asked],
        "tokens": options.choose(options.tokens, 32, 96),
        "repeats": options.choose(options.repeats, 1, 3),
        "modes": list(options.modes or ("temperature 1",)),
        "gamma": gamma,
        "top_k": list(options.choose(top_ks, (128,), (64, 128, 256))),
    }
    run_or_exit(_bench(asked, options, settings, path))
    finish(path, markdown=options.markdown, figures=options.figures)


async def _bench(asked: Sequence[Prompt], options: Options, settings: dict[str, Any], path: Path) -> None:
    whole = ("--draft-top-k", "0")
    kinds = {
        DENSE: (("--no-partial-rows",), whole),
        THIN: ((), whole),
        **{top_k(k): ((), ("--draft-top-k", str(k))) for k in settings["top_k"]},
    }
    gamma = settings["gamma"]
    async with contextlib.AsyncExitStack() as stack:
        clusters = {
            kind: await start(
                stack,
                options.services(
                    coordinator=(*coordinator, "--overlap", "off"),
                    draft=("--ngram-first", "0", *draft),
                    target=_KV_MEMORY,
                ),
                kind,
            )
            for kind, (coordinator, draft) in kinds.items()
        }
        stubs = {kind: await connect(stack, cluster.address) for kind, cluster in clusters.items()}
        systems = [Service(kind, stub, gamma) for kind, stub in stubs.items()]
        systems.append(Service(COUPLED, stubs[THIN], gamma, worker_pb2.VERIFICATION_COUPLED))
        loaded = load(options.target)
        store = Store(path, about(TABLE, loaded, {**settings, **options.settings()}))
        asked_as_ids = questions(asked, options.target)
        planned = list(blocks(asked_as_ids, settings["modes"], settings["repeats"], settings["tokens"]))
        await run(store, systems, planned, asked_as_ids[0], loaded.weights_hash)
