"""A gRPC server's life: listen at once, serve when warm, drain on SIGTERM, exit 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common.rpc.addresses import is_loopback
from services.common.rpc.channel import keepalive_options, message_options
from services.common.rpc.guards import CallerNames
from services.common.rpc.logs import configure_logging
from services.common.rpc.probes import Probes, add_port
from services.common.rpc.settings import ServerSettings
from services.common.rpc.telemetry import configure_telemetry, flush_telemetry
from services.common.rpc.tls import server_credentials
from services.common.specdec.errors import StartupError

log = logging.getLogger(__name__)


class Server:
    """A gRPC server with health, reflection and an orderly end.

    It listens before it serves, so that its port is known and its health can be asked while a model loads: NOT_SERVING
    until `ready`. `health_listen` has the same told on a port of its own, for probes.

    Attributes:
        draining: It is going to stop: services say so in their replies, and go on answering.
    """

    def __init__(
        self,
        settings: ServerSettings,
        services: Sequence[str],
        receive_mib: int | None = None,
        guards: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """Make a server.

        Args:
            settings: Address, limits and times.
            services: Full names of the services, for health and reflection.
            receive_mib: Largest message received; default `max_message_mib`. A message is parsed in the event loop
                before anything can refuse it, so what strangers send should be held smaller than what rows need.
            guards: Interceptors that refuse calls, besides the one that `tls_clients` asks for.

        Raises:
            StartupError: Certificates cannot be read or used.
        """
        self._settings = settings
        self._services = tuple(services)
        options = [
            *message_options(settings.max_message_mib, receive_mib),
            *keepalive_options(settings.keepalive_s),
            # Two servers on one port would split the calls between them: let the second fail instead.
            ("grpc.so_reuseport", 0),
        ]
        if settings.max_connection_age_s:
            options.append(("grpc.max_connection_age_ms", int(settings.max_connection_age_s * 1000)))
        self._credentials = server_credentials(settings)
        names = settings.allowed_callers
        self.grpc = grpc.aio.server(options=options, interceptors=[*([CallerNames(names)] if names else []), *guards])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)
        self._probes = Probes(settings.health_listen) if settings.health_listen else None
        self.address = ""
        self.draining = False

    @property
    def health_address(self) -> str:
        """Where probes are answered, once it listens; empty where they are not."""
        return self._probes.address if self._probes else ""

    async def listen(self) -> str:
        """Start to listen and print `LISTENING host:port`, the line that a parent process waits for.

        Raises:
            StartupError: The address cannot be had.
        """
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.address = add_port(self.grpc, self._settings.listen, self._credentials)
        if self._credentials is None and not is_loopback(self.address):
            log.warning(
                "in plain text on %s, as --insecure asks: who is on the way can read and change it", self.address
            )
        if self._probes:
            await self._probes.start()
        await self.grpc.start()
        print(f"LISTENING {self.address}", flush=True)  # noqa: T201
        return self.address

    async def ready(self) -> None:
        """Report SERVING."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        if self._probes:
            await self._probes.set_ready(True)
        log.info("serving on %s", self.address)

    async def drain(self) -> None:
        """Report NOT_SERVING, and have services tell the streams that they have to leave where they can."""
        self.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._probes:
            await self._probes.set_ready(False)

    async def stop(self) -> None:
        """Drain, wait for traffic to turn away, then let running streams leave or finish within the grace."""
        await self.drain()
        # stop() refuses new calls at once, so balancers have to be given the time to turn away before it.
        await asyncio.sleep(self._settings.drain_s)
        await self.grpc.stop(self._settings.shutdown_grace_s)
        await self.close()

    async def close(self) -> None:
        """Stop listening at once, everywhere. May be called again."""
        await self.grpc.stop(None)
        if self._probes:
            await self._probes.stop()

    async def _set_health(self, status: int) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)


def exit_on_signal() -> None:
    """Make SIGTERM and SIGINT end the process quietly until `stop_signal` takes over.

    As a container's first process it would otherwise ignore a SIGTERM that comes while torch is being imported.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def stop_this_process() -> None:
    """Drain and end, as after a SIGTERM; from any thread. For a service that can do nothing for anybody any more."""
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the first SIGTERM or SIGINT sets; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stopped.is_set():
            log.warning("second %s: ending at once", number.name)
            os._exit(128 + number)
        log.info("%s: draining", number.name)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stopped
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def run(server: Server, prepare: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> None:
    """Live a server's whole life: listen, prepare, serve, drain on the stop signal, close.

    Args:
        server: With its services registered.
        prepare: Makes them ready; the server reports SERVING when it is done.
        close: Frees what they hold, after the last call.

    Raises:
        StartupError: It cannot listen, or `prepare` raised one.
    """
    async with stop_signal() as stopped:
        await server.listen()
        preparing = asyncio.ensure_future(prepare())
        waiting = asyncio.create_task(stopped.wait())
        await asyncio.wait({waiting, preparing}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            # A model load cannot be interrupted, and there is nothing to finish.
            os._exit(0)
        try:
            if preparing.exception() is None:
                await server.ready()
                await waiting
                await server.stop()
            preparing.result()
        finally:
            waiting.cancel()
            await server.close()
            await close()


def run_process(settings: ServerSettings, service_name: str, serve: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a service as this process: logs, telemetry, event loop, exit code.

    Raises:
        SystemExit: It cannot start; the log says why.
    """
    instance = instance_name(settings)
    configure_logging(
        settings.log_level, settings.log_format, {"service": service_name, "instance": instance}, settings.log_content
    )
    exit_on_signal()
    try:
        configure_telemetry(service_name, instance, settings.metrics_listen)
        asyncio.run(serve())
    except StartupError as error:
        log.critical("%s: %s", service_name, error)
        raise SystemExit(1) from error
    finally:
        flush_telemetry()


def instance_name(settings: ServerSettings) -> str:
    """Return the name of this process in logs and traces."""
    return settings.worker_id or f"{socket.gethostname()}-{os.getpid()}"
