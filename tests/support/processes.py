"""The three services as real processes on free ports.

with Processes(folder) as run:
    target = run.target("--model", "default", "--dtype", "float32")
    draft = run.draft("--drafter", "ngram")
    coordinator = run.coordinator(target, draft)
    reply = coordinator.generate(text="Once upon a time", gamma=2, max_tokens=8)

Starting does not wait: what needs an address or an answer does, so that several services load at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, worker_pb2
from tests.support.cluster import Reply

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
GREEDY = worker_pb2.SamplingParams(temperature=0.0)
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        host: The address it listens on.
        prefix: What its command begins with.
    """

    host: str = "127.0.0.1"
    prefix: Sequence[str] = ()


HERE = Place()


class Service:
    """One service: its process, its address, its log.

    Attributes:
        package: Where its module is.
    """

    package = "services"

    def __init__(
        self, kind: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, place: Place = HERE
    ) -> None:
        """Start a process.

        Args:
            kind: `coordinator`, `draft_worker` or `target_worker`.
            arguments: Of its command.
            env: Added to an environment without OTEL_ and PACELINE_ variables, but for PACELINE_HOME.
            log: Gets its standard error.
            place: Where it runs.
        """
        self.kind = kind
        self._place = place
        self._arguments = list(arguments)
        self._env = _clean_environment() | dict(env)
        self._log = log
        self._address = ""
        self._process = self._spawn(f"{place.host}:0")

    @property
    def address(self) -> str:
        """Where it listens; waits for it to say so."""
        if not self._address:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line.startswith("LISTENING "), f"the {self.kind} ended at once:\n{self.log}"
            self._address = line.removeprefix("LISTENING ").strip()
        return self._address

    @property
    def metrics_address(self) -> str:
        """Where its page of metrics is: its arguments say so."""
        return self._arguments[self._arguments.index("--metrics-listen") + 1]

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def wait_until_serving(self) -> None:
        """Wait until its health is SERVING."""
        with grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            give_up_s = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    left_s = give_up_s - time.monotonic()
                    for reply in stub.Watch(request, timeout=left_s, wait_for_ready=True):
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.RpcError as error:
                    # A server that cuts its connections is asked again, one that has ended is not.
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or self._ends_within(0.5):
                        raise AssertionError(f"the {self.kind} does not serve:\n{self.log}") from error

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it without a word, and wait for that."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """Send SIGTERM, wait for its end and return its exit code."""
        self._process.terminate()
        return self._process.wait(STOP_TIMEOUT_S)

    def restart(self, *arguments: str) -> None:
        """Start it again at the address that it had; with other arguments, if any are given."""
        address = self.address
        self._arguments = list(arguments) or self._arguments
        self.close()
        self._process = self._spawn(address)
        self._address = ""

    def close(self) -> None:
        """End it, if it has not ended, and let go of it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _spawn(self, listen: str) -> subprocess.Popen[str]:
        python = [*self._place.prefix, sys.executable, "-m"]
        command = [*python, f"{self.package}.{self.kind}", "--listen", listen, *self._arguments]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env
            )


class Coordinator(Service):
    """A coordinator, and calls of it."""

    def generate(self, *, timeout_s: float = 120.0, metadata: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """Generate one answer; greedy unless `sampling` is given.

        Args:
            timeout_s: Deadline of the call.
            metadata: Of the call.
            fields: Of the request.

        Raises:
            grpc.RpcError: The call failed.
        """
        request = pb.GenerateRequest(**({"sampling": GREEDY} | fields))
        with self.connected() as stub:
            call = stub.Generate(request, timeout=timeout_s, metadata=tuple((metadata or {}).items()))
            items = list(call)
        return Reply(tuple(item.chunk for item in items if item.HasField("chunk")), items[-1].result)

    @contextlib.contextmanager
    def connected(self) -> Iterator[coordinator_pb2_grpc.CoordinatorServiceStub]:
        """Yield a stub on a channel of its own."""
        with grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)

    def wait_for_draft(self) -> None:
        """Wait until a round has had its drafts' worker."""
        while self.generate(text="a a a a", gamma=1, max_tokens=2).result.speculation.degraded_rounds:
            pass


S = TypeVar("S", bound=Service)


class Processes:
    """Starts services and ends them all with the `with` block."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        """Keep logs in `folder`; `env` is added to every service's environment."""
        self._folder = folder
        self._env = dict(env or {})
        self._services: list[Service] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Last started first: a coordinator that outlives its workers would look for them.
        for service in reversed(self._services):
            service.close()

    def target(self, *arguments: str, env: Mapping[str, str] | None = None, place: Place = HERE) -> Service:
        """Start a target worker, with `env` added to its environment."""
        return self._add(Service, "target_worker", arguments, env, place)

    def draft(self, *arguments: str, env: Mapping[str, str] | None = None, place: Place = HERE) -> Service:
        """Start a draft worker, with `env` added to its environment."""
        return self._add(Service, "draft_worker", arguments, env, place)

    def coordinator(
        self,
        target: Service,
        draft: Service | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        place: Place = HERE,
        wait_for_draft: bool = True,
    ) -> Coordinator:
        """Start a coordinator once its workers serve, and wait until it does.

        Args:
            target: Its target worker.
            draft: Its draft worker, if it is to have one.
            arguments: More of its command. By default no draft is ever late.
            env: Added to its environment.
            place: Where it runs.
            wait_for_draft: Return only when the draft is used.
        """
        for worker in (target, draft):
            if worker is not None:
                worker.wait_until_serving()
        addresses = ("--target", target.address, "--draft", draft.address if draft else "")
        defaults = ("--draft-timeout-s", "60", "--shutdown-grace-s", "5")
        coordinator = self._add(Coordinator, "coordinator", (*addresses, *defaults, *arguments), env, place)
        coordinator.wait_until_serving()
        if draft is not None and wait_for_draft:
            coordinator.wait_for_draft()
        return coordinator

    def _add(
        self, made: type[S], kind: str, arguments: Sequence[str], env: Mapping[str, str] | None, place: Place = HERE
    ) -> S:
        log = self._folder / f"{len(self._services)}-{kind}.log"
        service = made(kind, arguments, self._env | dict(env or {}), log, place)
        self._services.append(service)
        return service


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without what would configure the services, or send their calls to a proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PACELINE_"))}
    if home := os.environ.get("PACELINE_HOME"):
        kept["PACELINE_HOME"] = home
    return kept | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
