"""Shows what is being waited for: one moving line on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from services.cli.output import stderr_console


@contextlib.contextmanager
def progress(*, moving: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a few words; on a terminal the line is gone at the end.

    Args:
        moving: Allow the moving line; not while others write to the terminal.
    """
    console = stderr_console()
    if not (moving and console.is_terminal):
        yield lambda words: console.print(words, markup=False, soft_wrap=True)
        return
    words_column = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    bar = Progress(SpinnerColumn(), words_column, TimeElapsedColumn(), console=console, transient=True, expand=True)
    with bar:
        task = bar.add_task("", total=None)
        yield lambda words: bar.update(task, description=words)
