"""Shows how far the runs are: a bar on a terminal, a line for each prompt elsewhere, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.measure import Step
from services.cli.output import stderr_console


@contextlib.contextmanager
def run_progress(total: int) -> Iterator[Callable[[Step], None]]:
    """Yield a function to be told of every run before it starts."""
    console = stderr_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    # Drawn between the runs and not by a thread of its own, which would take its time from them.
    bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, auto_refresh=False)
    task = bar.add_task("", total=total)
    begun = 0

    def on_step(step: Step) -> None:
        nonlocal begun
        prompt = f"repeat {step.repeat + 1}, {step.question.category}"
        if console.is_terminal:
            bar.update(task, description=f"{prompt}: {step.mode}, {step.system.name}", completed=begun, refresh=True)
        elif begun == 0 or prompt != said[-1]:
            said.append(prompt)
            console.print(f"{begun} of {total} runs: {prompt}", markup=False, soft_wrap=True)
        begun += 1

    said: list[str] = []
    with bar if console.is_terminal else contextlib.nullcontext():
        yield on_step
        if console.is_terminal:
            bar.update(task, description="all runs", completed=begun, refresh=True)
