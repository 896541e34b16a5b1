"""Prometheus and promtool: those of `make prometheus`, else those on the PATH."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / ".prometheus" / "usr" / "bin"


def tool(name: str) -> Path:
    """Return the program, or skip the test: it is a Debian package, and `.ci/run` always has it."""
    found = shutil.which(name, path=_FOLDER) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: `make prometheus` gets it, where there is apt-get")
    return Path(found)
