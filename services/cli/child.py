"""One service as a child process: its address, its end, its last words."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.cli.relay import Relay

_PR_SET_PDEATHSIG = 1
_LISTENING = "LISTENING "


@dataclass(frozen=True, slots=True)
class Service:
    """What is started: its name for people, the module to run, and the variable that says where its health is asked."""

    name: str
    module: str
    health_variable: str


class Child:
    """A running service, in a session of its own: a terminal's Ctrl-C is this process's to handle."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process, relay: Relay | None) -> None:
        self.service = service
        self._process = process
        self._relay = relay

    @classmethod
    async def spawn(
        cls, service: Service, arguments: Sequence[str], env: Mapping[str, str], relay: Relay | None
    ) -> Child:
        """Start a service.

        Args:
            service: Which.
            arguments: Of its command.
            env: Its environment.
            relay: Takes its standard error; None leaves that on this process's.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                service.module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=relay.theirs if relay else None,
                env=env,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        finally:
            if relay:
                os.close(relay.theirs)
        return cls(service, process, relay)

    async def address(self) -> str:
        """Return the address that the service prints once it listens; never return where it ends without."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(_LISTENING):
                return text.removeprefix(_LISTENING)
        return await asyncio.Future()

    async def ended(self) -> None:
        """Wait until the process has ended and its last words are here."""
        await self._process.wait()
        if self._relay:
            # A process that it left behind may hold the other end open.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._relay.ended.wait(), timeout=1.0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the service and to whatever it started."""
        # macOS refuses where only an ended process is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        """Wait for its end and let go of it."""
        await self.ended()
        if self._relay:
            self._relay.close()

    def describe_end(self) -> str:
        """Return how it ended, and its last lines where they have not been seen."""
        code = self._process.returncode
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self._relay is None:
            return f"the {self.service.name} {how}"
        said = "".join(f"\n  {line}" for line in self._relay.tail) or "\n  (nothing)"
        return f"the {self.service.name} {how}; its last lines:{said}"


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a new child runs so that it gets SIGTERM when this process ends, even by SIGKILL; Linux only."""
    if sys.platform != "linux":
        return None
    # Loaded before the fork: after it only the plainest calls are safe.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
