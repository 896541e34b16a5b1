"""From a results file to tables and plots: at the end of every run, and `python -m bench report FILE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

from bench import adaptive_report, compare_report, gammas_report, plots, tracing_report, wire_report
from bench.record import Record
from bench.report import Table, show
from bench.store import read_results

_TABLES: Mapping[str, Callable[[Sequence[Record]], list[Table]]] = {
    "compare": compare_report.tables,
    "gammas": gammas_report.tables,
    "adaptive": adaptive_report.tables,
    "wire": wire_report.tables,
    "tracing": tracing_report.tables,
}
_FIGURES: Mapping[str, Callable[[Sequence[Record]], dict[str, Figure]]] = {
    "compare": plots.compare,
    "gammas": plots.gammas,
    "adaptive": plots.adaptive,
}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--markdown", is_flag=True, help="Print the tables as in docs/benchmarks.md.")
@click.option("--figures", type=click.Path(file_okay=False, path_type=Path), help="Default: beside the results.")
def main(file: Path, markdown: bool, figures: Path | None) -> None:
    """Print the tables of a results file and draw its plots; it need not be complete."""
    finish(file, markdown=markdown, figures=figures)


def finish(path: Path, *, markdown: bool, figures: Path | None) -> None:
    """Print the tables of a results file and draw its plots.

    Args:
        path: Of the file.
        markdown: Print the tables as in docs/benchmarks.md.
        figures: Folder of the plots; None is the file's own.
    """
    about: dict[str, Any]
    about, found = read_results(path)
    if not found:
        raise click.ClickException(f"{path} has no measurement yet")
    records = list(found.values())
    kind = about["table"]
    show(about, path.name, _TABLES[kind](records), markdown=markdown)
    folder = figures or path.parent
    folder.mkdir(parents=True, exist_ok=True)
    draw = _FIGURES.get(kind)
    for name, figure in (draw(records) if draw else {}).items():
        # With a folder of their own the plots have lasting names, for a page that shows them.
        plot = folder / (f"{name}.png" if figures else f"{path.stem}-{name}.png")
        figure.savefig(plot, dpi=120)
        click.echo(f"Drawn: {plot}", err=True)
    click.echo(f"Results: {path}", err=True)
