"""`paceline demo`: everything once, on this machine."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from paceline.v1 import coordinator_pb2
from services.cli.cluster import local_cluster
from services.cli.interrupt import run_or_exit
from services.cli.output import stdout_console
from services.cli.progress import progress
from services.cli.request import build_request, int32, uint64
from services.cli.show import show_answer
from services.cli.up import service_arguments

# Greedy, and something that a small model has learnt: what it makes up goes round in circles.
PROMPT = "Why is the sky blue?"
TEMPERATURE = 0.0
MAX_TOKENS = 160


@click.command()
@click.option("--prompt", "chat", default=PROMPT, show_default=True, metavar="TEXT", help="What to ask the model.")
@click.option("--max-tokens", type=int32, metavar="N", default=MAX_TOKENS, show_default=True, help="Most tokens.")
@click.option("--temperature", type=float, metavar="X", default=TEMPERATURE, show_default=True, help="0 is greedy.")
@click.option("--seed", type=uint64, metavar="N", help="Key of the random numbers.  [default: drawn, and shown]")
@click.option(
    "--gamma", type=int32, metavar="N", help="Drafts in a round; 0 uses the target alone.  [default: what pays]"
)
@click.option("--model", metavar="MODEL", help="Local folder, hub id, GGUF file.  [default: SmolLM2-135M-Instruct]")
def demo(model: str | None, **fields: Any) -> None:
    """Start the three services here, stream one answer, stop them.

    The first run fetches the default model. On a terminal each token has the colour of its origin.
    """
    run_or_exit(_demo(build_request(**fields), service_arguments(model=model)))


async def _demo(request: coordinator_pb2.GenerateRequest, arguments: tuple[list[str], list[str], list[str]]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        with progress() as report:
            cluster = await stack.enter_async_context(local_cluster(*arguments, os.environ, report))
        console = stdout_console()
        if console.is_terminal:
            console.print(request.chat.messages[0].content, style="bold", markup=False, soft_wrap=True)
        await cluster.run(show_answer(cluster.address, request))
