"""The `paceline` command with fake services: `python -m tests.cli.fakes.paceline up ...`."""

from __future__ import annotations

import os
from dataclasses import replace

from services.cli import cluster
from services.cli.main import main

if __name__ == "__main__":
    cluster.COORDINATOR = replace(cluster.COORDINATOR, module="tests.cli.fakes.coordinator")
    cluster.DRAFT = replace(cluster.DRAFT, module="tests.cli.fakes.draft")
    cluster.TARGET = replace(cluster.TARGET, module="tests.cli.fakes.target")
    cluster._STOP_TIMEOUT_S = float(os.environ.get("FAKE_PATIENCE_S", cluster._STOP_TIMEOUT_S))
    main(prog_name="paceline")
