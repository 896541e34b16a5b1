"""The `paceline` command with fake services: `python -m tests.cli.fakes.paceline up ...`."""

from __future__ import annotations

from dataclasses import replace

from services.cli import cluster
from services.cli.main import main

if __name__ == "__main__":
    cluster.COORDINATOR = replace(cluster.COORDINATOR, module="tests.cli.fakes.coordinator")
    cluster.DRAFT = replace(cluster.DRAFT, module="tests.cli.fakes.draft")
    cluster.TARGET = replace(cluster.TARGET, module="tests.cli.fakes.target")
    main(prog_name="paceline")
