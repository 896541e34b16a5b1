"""The coordinator as an object: built from settings, started, stopped."""

from __future__ import annotations

import asyncio

from opentelemetry.metrics import Meter

from paceline.v1 import coordinator_pb2_grpc
from services.common.rpc.server import Server, run
from services.coordinator.config import CoordinatorSettings
from services.coordinator.instruments import Instruments
from services.coordinator.service import SERVICE, CoordinatorService
from services.coordinator.workers import Workers


class Coordinator:
    """Server, worker channels and service of one coordinator.

    Attributes:
        address: Where it listens, once started.
    """

    def __init__(self, settings: CoordinatorSettings, meter: Meter | None = None) -> None:
        """Make a coordinator; it does nothing yet.

        Args:
            settings: Its settings.
            meter: Where its metrics go; None for where the environment says.
        """
        instruments = Instruments(meter)
        self._server = Server(settings, [SERVICE], receive_mib=settings.max_request_mib)
        self._workers = Workers(settings, instruments)
        service = CoordinatorService(settings, self._workers, instruments)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, self._server.grpc)
        self._ready: asyncio.Task[None] | None = None
        self.address = ""

    async def run(self) -> None:
        """Run until the stop signal; SERVING once a target has been found.

        Raises:
            StartupError: The address cannot be had.
        """
        await run(self._server, self._find_target, self._workers.close)

    async def start(self) -> None:
        """Listen, and look for the workers: the same life without signals, for a process that has more than this."""
        self.address = await self._server.listen()
        self._ready = asyncio.create_task(self._serve_when_found())

    async def wait_until_ready(self) -> None:
        """Wait until it serves."""
        assert self._ready is not None
        await self._ready

    async def stop(self) -> None:
        """Drain: running streams finish within the grace, then everything is closed."""
        if self._ready is not None:
            self._ready.cancel()
            await asyncio.gather(self._ready, return_exceptions=True)
        await self._server.stop()
        await self._workers.close()

    async def _find_target(self) -> None:
        self._workers.start()
        await self._workers.wait_for_target()

    async def _serve_when_found(self) -> None:
        await self._find_target()
        await self._server.ready()


async def serve(settings: CoordinatorSettings) -> None:
    """Run until the stop signal.

    Raises:
        StartupError: The address cannot be had.
    """
    # Built here and not by the caller: gRPC binds a server to the loop that it is made in.
    await Coordinator(settings).run()
