from __future__ import annotations

from tests.cli.fakes import run

run("target")
