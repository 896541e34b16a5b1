"""Run the target worker: `python -m services.target_worker`, or `paceline target-worker`."""

from __future__ import annotations

import asyncio

from services.common.rpc.server import configure_logging, exit_on_signal
from services.common.rpc.settings import command
from services.common.rpc.telemetry import flush_telemetry
from services.target_worker.config import TargetSettings


@command(TargetSettings, name="target-worker")
def main(settings: TargetSettings) -> None:
    """Serve the target model: its distribution after each drafted token."""
    configure_logging(settings.log_level)
    exit_on_signal()
    # torch takes seconds to import: --help and a wrong flag should not wait for it.
    from services.target_worker.app import serve

    try:
        asyncio.run(serve(settings))
    finally:
        flush_telemetry()


if __name__ == "__main__":
    main()
