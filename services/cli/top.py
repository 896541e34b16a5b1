"""`paceline top`: running pods, from their metrics pages."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import datetime

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.cli.interrupt import run, run_or_exit
from services.cli.output import stdout_console
from services.cli.pages import LOCAL_PAGES, PageError, read_page
from services.cli.pods import Pod, pods_view

# A page takes some 10 ms; a pod that needs so long is no better than one that is down.
_TIMEOUT_S = 2.0
# What a pipe is read by has no width.
_PIPE_WIDTH = 200


@click.command()
@click.argument("pages", nargs=-1, metavar="[HOST:PORT]...")
@click.option("--once", is_flag=True, help="Print one table, of what happens within one interval, and end.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Read the pages this often.",
)
def top(pages: Sequence[str], once: bool, interval_s: float) -> None:
    """Watch running pods by their metrics pages (--metrics-listen), by default those of `paceline up`.

    Rates and means are of the last interval. A pod's sessions and KV cache are how it stands. In a pipe one table
    follows the other. With --once the exit code is 1 where no pod answers.
    """
    pods = [Pod(address) for address in pages or LOCAL_PAGES]
    if once:
        run_or_exit(_once(pods, interval_s, told=not pages))
    else:
        run(_watch(pods, interval_s))


async def _once(pods: Sequence[Pod], interval_s: float, told: bool) -> None:
    await _read(pods)
    if any(pod.page for pod in pods):
        await asyncio.sleep(interval_s)
        await _read(pods)
    console = _console()
    console.print(pods_view(pods, console))
    if not any(pod.page for pod in pods):
        if told:
            click.echo(
                "Start pods with `paceline up`, or name their metrics pages: paceline top HOST:PORT ...", err=True
            )
        sys.exit(1)


async def _watch(pods: Sequence[Pod], interval_s: float) -> None:
    console = _console()
    if not console.is_terminal:
        while True:
            await _read(pods)
            console.print(_frame(pods, interval_s, console))
            console.file.flush()
            await asyncio.sleep(interval_s)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            await _read(pods)
            live.update(_frame(pods, interval_s, console), refresh=True)
            await asyncio.sleep(interval_s)


def _console() -> Console:
    console = stdout_console()
    return console if console.is_terminal else Console(file=console.file, highlight=False, width=_PIPE_WIDTH)


def _frame(pods: Sequence[Pod], interval_s: float, console: Console) -> Group:
    up = sum(pod.page is not None for pod in pods)
    time = f"{datetime.now():%H:%M:%S}"
    head = f"paceline top · {up} of {len(pods)} pods · every {interval_s:g} s · {time}"
    return Group(Text(head, style="dim"), pods_view(pods, console))


async def _read(pods: Sequence[Pod]) -> None:
    """Read all pages at once."""
    await asyncio.gather(*map(_read_one, pods))


async def _read_one(pod: Pod) -> None:
    try:
        pod.seen(await asyncio.to_thread(read_page, pod.address, _TIMEOUT_S))
    except PageError as error:
        pod.missed(str(error))
