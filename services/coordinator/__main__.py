"""Run the coordinator: `python -m services.coordinator`, or `paceline coordinator`."""

from __future__ import annotations

from services.common.rpc.server import run_process
from services.common.rpc.settings import command
from services.coordinator.app import serve
from services.coordinator.config import CoordinatorSettings


@command(CoordinatorSettings, name="coordinator")
def main(settings: CoordinatorSettings) -> None:
    """Serve Generate: draft, verify, accept, stream."""
    run_process(settings, "paceline-coordinator", lambda: serve(settings))


if __name__ == "__main__":
    main()
