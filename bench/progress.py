"""Shows how far the runs are: a bar on a terminal, a line for each prompt elsewhere, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.record import Place
from services.cli.output import stderr_console


@contextlib.contextmanager
def run_progress(total: int) -> Iterator[Callable[[Place, str], None]]:
    """Yield a function to be told of every measurement before it starts: where it is, and of which system."""
    console = stderr_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    # Drawn between the runs and not by a thread of its own, which would take its time from them.
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, auto_refresh=False)
    task = bar.add_task("", total=total)
    begun = 0
    said = ""

    def on_step(place: Place, system: str) -> None:
        nonlocal begun, said
        streams = f", {place.streams} streams" if place.streams > 1 else ""
        where = f"repeat {place.repeat + 1}, {place.category}{streams}"
        if console.is_terminal:
            bar.update(task, description=f"{where}: {place.mode}, {system}", completed=begun, refresh=True)
        elif where != said:
            said = where
            console.print(f"{begun} of {total} runs: {where}", markup=False, soft_wrap=True)
        begun += 1

    with bar if console.is_terminal else contextlib.nullcontext():
        yield on_step
        if console.is_terminal:
            bar.update(task, description="all runs", completed=begun, refresh=True)
