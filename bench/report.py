"""Tables, for a terminal and for docs/benchmarks.md, and what is said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rich.table
from rich.console import Console

from bench.statistics import Interval
from bench.summary import FLOOR


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be shown in several ways. The first `labels` columns are words, the others figures."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 2

    def markdown(self) -> str:
        """Return it as GitHub shows it."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.headers) - self.labels)
        lines = [self.headers, tuple(rule), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def rich(self) -> rich.table.Table:
        """Return it as a terminal shows it."""
        shown = rich.table.Table(title=self.title, title_justify="left", title_style="bold")
        for i, header in enumerate(self.headers):
            shown.add_column(header, justify="left" if i < self.labels else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown


def show(about: Mapping[str, Any], name: str, tables: Sequence[Table], *, markdown: bool) -> None:
    """Print the setting and the tables."""
    console = Console(highlight=False)
    console.print(setting(about, name) + "\n", markup=False, soft_wrap=markdown)
    for table in tables:
        console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)


def setting(about: Mapping[str, Any], name: str) -> str:
    """Return one sentence on what was measured, where, and in which results file."""
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    return (
        f"{settings['model']} in {settings['dtype']} on {machine['cpu']}, {machine['cores']} cores "
        f"({', '.join(machine['cpu_flags'])}), {machine['memory_gib']} GiB, load {machine['load_before'][0]} before; "
        f"torch {versions['torch']} with {machine['torch_threads']} threads, transformers {versions['transformers']}, "
        f"grpcio {versions['grpcio']}, Python {versions['python']}; draft: {settings['draft'] or 'n-gram lookup'}; "
        f"{settings['tokens']} tokens an answer, {settings['repeats']} repeats; "
        f"commit {about['commit'] or 'unknown'}, {about['started'][:10]}, {name}."
    )


def met(is_met: bool, target: str) -> str:
    """Return a target, and whether it is met."""
    return f"{target}: {'met' if is_met else 'missed'}"


def not_slower(times: Interval) -> str:
    """Say whether a ratio is at least FLOOR; it is missed where the whole interval lies below."""
    if times.value >= FLOOR:
        return f"≥ {FLOOR}: met"
    return f"≥ {FLOOR}: {'within noise' if times.high >= FLOOR else 'missed'}"


def figure(value: float | None, form: str) -> str:
    """Return a number in a form, nothing for None."""
    return "" if value is None else format(value, form)


def interval(times: Interval) -> str:
    """Return the bounds."""
    return f"{times.low:.2f} to {times.high:.2f}"
