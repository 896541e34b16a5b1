"""`paceline distill`: a draft for a target, with no other data than what the target writes itself."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.cli.output import stderr_console
from services.common.specdec.errors import StartupError

_PLAIN_EVERY_S = 60.0


@click.command()
@click.option("--target", default="default", show_default=True, help="Local folder, hub id or GGUF file.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the draft; gone on with.")
@click.option(
    "--hours", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Of this run, in all."
)
@click.option(
    "--kind", type=click.Choice(("hidden", "tokens")), help="Fed with the target's states or not.  [default: hidden]"
)
@click.option("--layers", type=click.IntRange(1, 4), help="Of the draft.  [default: 1 for hidden, 2 for tokens]")
@click.option("--head", type=click.IntRange(2), help="Tokens that it can propose.  [default: 8192]")
@click.option(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Token ids that the target wrote, integers [texts, positions] in a .npy file; may be given again.",
)
@click.option(
    "--openings",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Beginnings of questions, one a line, that the target goes on from; an empty line leaves it free.",
)
@click.option(
    "--start",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A draft of this target to begin with, in place of the target's own layers.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of everything.  [default: 0]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]")
@click.option(
    "--tokens-to-write",
    type=click.IntRange(0),
    help="The target writes so many in all.  [default: 1,000,000; 0 with --texts]",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, ...; auto takes a GPU if there is one.")
def distill(out: Path, **choices: Any) -> None:
    """Make a draft for a target: it writes texts, and a small model learns its distributions.

    Needs nothing but the target. Ctrl-C saves; the same command goes on where it stopped, and more hours make a better
    draft. docs/drafts.md tells what to expect, and how to serve and measure the draft.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise click.ClickException("distill needs torch and transformers: pip install 'paceline[worker]'")
    # Only here: the command line of an image without torch has this command too.
    from services.distill.pipeline import distill as run
    from services.distill.run import DistillOptions

    options = DistillOptions(out=out, **choices)
    with _signals() as received, _shown() as progress:
        try:
            outcome = run(options, lambda: bool(received), progress)
        except StartupError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise click.ClickException(f"--out {out}: the disk is full; what was saved is kept") from error
            raise
    if outcome.score is not None:
        alphas = " ".join(f"{alpha:.3f}" for alpha in outcome.score.alphas)
        click.echo(f"{out}: alpha by step {alphas} on held-out texts; see {out / 'README.md'}")
    elif not received:
        click.echo(f"{out}: the hours ended before training began; nothing is lost", err=True)
    click.echo(f"To go on: {_again(out, choices)}", err=True)
    if received:
        raise SystemExit(128 + received[0])


def _again(out: Path, choices: dict[str, Any]) -> str:
    """Return the command that goes on: what the folder was begun with need not be said again."""
    words = [
        "paceline",
        "distill",
        "--target",
        choices["target"],
        "--out",
        str(out),
        "--hours",
        f"{choices['hours']:g}",
    ]
    for name in ("threads", "tokens_to_write"):
        if choices[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(choices[name])]
    if choices["device"] != "auto":
        words += ["--device", choices["device"]]
    return shlex.join(words)


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Yield a list that the first SIGINT or SIGTERM is put into; a second one ends the process."""
    received: list[signal.Signals] = []

    def on_signal(number: int, _frame: object) -> None:
        received.append(signal.Signals(number))
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, b"\nStopping: saving what there is. Once more to stop at once.\n")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _shown() -> Iterator[_Bars | _Lines]:
    """Yield what shows progress: bars on a terminal, a line a minute elsewhere, always on standard error."""
    console = stderr_console()
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars:
    """A bar for each phase."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def say(self, words: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(words, markup=False)

    def update(self, phase: str, share: float, words: str) -> None:
        """Move a phase's bar."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=1.0, words="")
        self._bars.update(self._tasks[phase], completed=min(share, 1.0), words=words)


class _Lines:
    """A line now and then."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def say(self, words: str) -> None:
        """Print a line."""
        click.echo(words, file=sys.stderr)

    def update(self, phase: str, share: float, words: str) -> None:
        """Print a line, the first time and then once a minute."""
        now_s = time.monotonic()
        if now_s - self._told.get(phase, -_PLAIN_EVERY_S) >= _PLAIN_EVERY_S:
            self._told[phase] = now_s
            click.echo(f"{phase} {min(share, 1.0):.0%}: {words}", file=sys.stderr)
