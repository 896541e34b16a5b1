"""Run the coordinator: `python -m services.coordinator`, or `paceline coordinator`."""

from __future__ import annotations

import asyncio

from services.common.rpc.server import configure_logging, instance_name, stop_signal
from services.common.rpc.settings import command
from services.common.rpc.telemetry import configure_telemetry, flush_telemetry
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings


@command(CoordinatorSettings, name="coordinator")
def main(settings: CoordinatorSettings) -> None:
    """Serve Generate: draft, verify, accept, stream."""
    configure_logging(settings.log_level)
    configure_telemetry("paceline-coordinator", instance_name(settings.worker_id, settings.listen))
    try:
        asyncio.run(_serve(settings))
    finally:
        flush_telemetry()


async def _serve(settings: CoordinatorSettings) -> None:
    async with stop_signal() as stopped:
        coordinator = Coordinator(settings)
        await coordinator.start()
        await stopped.wait()
        await coordinator.stop()


if __name__ == "__main__":
    main()
