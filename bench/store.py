"""A results file that is written measurement by measurement, so that a run can be stopped and gone on with.

JSON lines: one that says what is measured and where, again each time that the run is gone on with; then measurements.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

from bench.record import Place, Record

_DIGITS = 3


class Store:
    """The measurements of one file.

    Attributes:
        about: What was measured, and where; of the first time.
        records: All measurements, those of the blocks that were broken off included, the last of each system.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Begin a file, or go on with one that is there.

        Args:
            path: Of the file.
            about: JSON. What is in its `settings` has to be the same each time.

        Raises:
            click.ClickException: The file is of another run.
        """
        self._path = path
        if path.exists():
            self.about, self.records = read_results(path)
            _refuse_other(path, self.about["settings"], json.loads(json.dumps(about["settings"])))
            # The line that was broken off, if one was, is measured again.
            path.write_text("".join(line + "\n" for line in _whole_lines(path)), encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.about, self.records = dict(about), {}
        self._append({"about": about})

    def has(self, place: Place, systems: Collection[str]) -> bool:
        """Tell whether all of these systems have been measured in this block."""
        return all((place, system) in self.records for system in systems)

    def add(self, measured: Record) -> None:
        """Keep a measurement."""
        self.records[measured.place, measured.system] = measured
        self._append(_rounded(measured.row()))

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_results(path: Path) -> tuple[dict[str, Any], dict[tuple[Place, str], Record]]:
    """Return what was measured, and the measurements.

    Raises:
        click.ClickException: It is no results file.
    """
    try:
        first, *rows = (json.loads(line) for line in _whole_lines(path))
        found = [Record.read(row) for row in rows if "about" not in row]
        return first["about"], {(each.place, each.system): each for each in found}
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{path} is no results file of this benchmark: {error!r}") from error


def _whole_lines(path: Path) -> list[str]:
    """Return the lines that were written to their end."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return lines


def _refuse_other(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise click.ClickException(
                f"{path} was begun with {name} {before.get(name)!r}, not {now.get(name)!r}: choose another --out"
            )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
