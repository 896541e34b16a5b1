"""Hosts apart, on one machine: network namespaces on a bridge, each with an address and a cable of its own.

with Hosts() as hosts:
    worker = hosts.add()
    target = run.target(..., place=worker.place)
    worker.cable.delay_s, worker.cable.loss = 0.005, 0.01
    worker.cable.is_cut = True
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType

from tests.support.cable import DEVICE, Cable
from tests.support.processes import Place


def missing() -> str:
    """Return why there can be no hosts apart on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip (Debian: iproute2)"
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"cables need {DEVICE}"
    name = f"plprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace.

    Attributes:
        name: Of the namespace.
        address: Of its only interface.
        cable: From there to the bridge.
    """

    name: str
    address: str
    cable: Cable

    @property
    def place(self) -> Place:
        """Where its processes run."""
        return Place(self.address, ("ip", "netns", "exec", self.name))


class Hosts:
    """Hosts on a bridge of this machine, which can reach them all. They go with the `with` block, whatever happens."""

    def __init__(self) -> None:
        # Names and addresses of their own, for tests that run side by side; 198.18.0.0/15 is reserved for such uses.
        self._tag = f"{os.getpid():x}"
        self._bridge = f"plb{self._tag}"
        self._subnet = f"198.18.{random.randrange(256)}"
        self._count = 1
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as undo:
            _ip("link", "add", self._bridge, "type", "bridge")
            undo.callback(_ip, "link", "delete", self._bridge)
            _ip("address", "add", f"{self._subnet}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def add(self) -> Host:
        """Make a host."""
        self._count += 1
        name, address = f"pl{self._tag}n{self._count}", f"{self._subnet}.{self._count}"
        outside, inside = f"plo{self._tag}n{self._count}", f"pli{self._tag}n{self._count}"
        _ip("netns", "add", name)
        self._undo.callback(_ip, "netns", "delete", name)
        cable = Cable(outside, inside)
        self._undo.callback(cable.close)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("link", "set", inside, "netns", name)
        _ip("-n", name, "address", "add", f"{address}/24", "dev", inside)
        _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return Host(name, address, cable)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
