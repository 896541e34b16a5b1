"""The three services on this machine, as three processes that live no longer than this one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.child import Child, Service
from services.cli.relay import Relay
from services.common.rpc.probes import READY

T = TypeVar("T")
Report = Callable[[str], None]

COORDINATOR = Service("coordinator", "services.coordinator", "PACELINE_COORDINATOR_HEALTH_LISTEN")
DRAFT = Service("draft worker", "services.draft_worker", "PACELINE_DRAFT_HEALTH_LISTEN")
TARGET = Service("target worker", "services.target_worker", "PACELINE_TARGET_HEALTH_LISTEN")

# What the services' logging puts in front of a message.
_LOG_PREFIX = re.compile(r"^[\d-]+ [\d:,]+ [A-Z] \S+: ")
_STOP_TIMEOUT_S = 4.0
_NOTICE_S = 0.5


class ClusterError(click.ClickException):
    """A service ended that should run; the message says which and what it said."""


class Cluster:
    """Three running services.

    Attributes:
        address: Of the coordinator.
        workers: What tells a coordinator of them, as arguments of its command.
    """

    def __init__(self, env: Mapping[str, str], report: Report, folder: Path, verbose: bool) -> None:
        self.address = ""
        self.workers: tuple[str, ...] = ()
        self._env, self._report, self._folder, self._verbose = env, report, folder, verbose
        self._children: list[Child] = []
        self._awaited: Service | None = None
        self._said: dict[Service, str] = {}

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, for as long as all services run.

        Raises:
            ClusterError: One of them ended first.
        """
        working = asyncio.ensure_future(work)
        ends = {asyncio.create_task(child.ended()): child for child in self._children}
        try:
            await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                # The work may have failed because a service did, which shows a moment later and is the better message.
                await asyncio.wait(ends, timeout=_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            for end, child in ends.items():
                if end.done():
                    raise ClusterError(child.describe_end())
            return await working
        finally:
            for task in (working, *ends):
                task.cancel()
            await asyncio.gather(working, *ends, return_exceptions=True)

    async def start(self, coordinator: Sequence[str], draft: Sequence[str], target: Sequence[str]) -> None:
        """Start the three and wait until all of them serve.

        Raises:
            ClusterError: One of them ended.
        """
        self._report("starting the workers")
        workers = [await self._spawn(TARGET, target), await self._spawn(DRAFT, draft)]
        target_address, draft_address = await self.run(_gather([worker.address() for worker in workers]))
        self.workers = ("--target", target_address, "--draft", draft_address)
        child = await self._spawn(COORDINATOR, [*coordinator, *self.workers])
        self.address = await self.run(child.address())
        for service in (DRAFT, TARGET, COORDINATOR):
            self._await(service)
            await self.run(_serving(self._health(service)))
        self._awaited = None

    async def stop(self) -> None:
        """Stop the coordinator, then the workers; kill what has not ended after a few seconds, or when cancelled."""
        first = [child for child in self._children if child.service is COORDINATOR]
        try:
            for children in (first, [child for child in self._children if child not in first]):
                for child in children:
                    child.signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_TIMEOUT_S):
                        await _gather([child.ended() for child in children])
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)
            await _gather([child.close() for child in self._children])

    async def _spawn(self, service: Service, arguments: Sequence[str]) -> Child:
        env = {**self._env, service.health_variable: self._health(service)}
        child = await Child.spawn(service, ["--listen", "127.0.0.1:0", *arguments], env, self._relay(service))
        self._children.append(child)
        return child

    def _health(self, service: Service) -> str:
        """Return where a service is asked for its health: in plain text, whatever its own port speaks."""
        # A name that is no path: those have to be short.
        return self._env.get(service.health_variable) or f"unix-abstract:{self._folder.name}-{service.module}"

    def _await(self, service: Service) -> None:
        self._awaited = service
        said = self._said.get(service)
        self._report(f"{service.name}: {said}" if said else f"waiting for the {service.name}")

    def _heard(self, service: Service, line: str) -> None:
        """Take note of a line of a service's log, and pass it on if that service is what is waited for."""
        message = _LOG_PREFIX.sub("", line)
        if message.startswith("serving on "):
            return
        self._said[service] = message
        if service is self._awaited:
            self._await(service)

    def _relay(self, service: Service) -> Relay | None:
        if self._verbose:
            return None
        log = (self._folder / f"{service.module}.log").open("wb")
        return Relay(log, lambda line: self._heard(service, line))


@contextlib.asynccontextmanager
async def local_cluster(
    coordinator_args: Sequence[str],
    draft_args: Sequence[str],
    target_args: Sequence[str],
    env: Mapping[str, str],
    report: Report,
    *,
    verbose: bool = False,
) -> AsyncIterator[Cluster]:
    """Run the three services on loopback, all serving, and stop them at the end.

    Args:
        coordinator_args: More arguments of its command.
        draft_args: The same.
        target_args: The same.
        env: The services' environment.
        report: Called with what is being waited for, in a few words.
        verbose: Leave the services' logs on standard error, and not in a temporary folder.

    Raises:
        ClusterError: A service ended before it served.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        cluster = Cluster(env, report, folder, verbose)
        try:
            await cluster.start(coordinator_args, draft_args, target_args)
            yield cluster
        finally:
            await cluster.stop()


async def _gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*works))


async def _serving(address: str) -> None:
    """Wait until a service is ready; its end before that is for others to notice."""
    request = health_pb2.HealthCheckRequest(service=READY)
    # A proxy that the environment names is not for this machine's own ports.
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs have no Watch
        while True:
            watch = stub.Watch(request, wait_for_ready=True)
            try:
                async for reply in watch:
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                # A service that gives up closes its server some time before its process ends.
                await asyncio.sleep(_NOTICE_S)
            finally:
                watch.cancel()
