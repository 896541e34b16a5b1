"""Hosts apart, on one machine: network namespaces on a bridge, each with an address and a link that can be cut.

with Hosts() as hosts:
    worker = hosts.add(delay_ms=5, loss_percent=1)
    target = run.target(..., place=worker.place)
    worker.cut()
    worker.mend()
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType

from tests.support.processes import Place


def missing() -> str:
    """Return why there can be no hosts apart on this machine; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if tools := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(tools)} (Debian: iproute2)"
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
        link: The other end of its cable, on the bridge.
    """

    name: str
    address: str
    link: str

    @property
    def place(self) -> Place:
        """Where its processes run."""
        return Place(self.address, ("ip", "netns", "exec", self.name))

    def cut(self) -> None:
        """Let every packet, in and out, vanish without a word."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Undo `cut`."""
        _ip("link", "set", self.link, "up")


class Hosts:
    """Hosts on a bridge of this machine, which can reach them all. They go with the `with` block, whatever happens."""

    def __init__(self) -> None:
        # Names and addresses of their own, for tests that run side by side; 198.18.0.0/15 is reserved for such uses.
        tag = f"{os.getpid():x}"
        self._bridge, self._tag = f"plb{tag}", tag
        self._subnet = f"198.18.{random.randrange(256)}"
        self._hosts: list[Host] = []

    def __enter__(self) -> Hosts:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            # A namespace outlives its name while a process runs in it; its cable need not.
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", host.link)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)
        _ip("link", "delete", self._bridge)

    def add(self, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> Host:
        """Make a host.

        Args:
            delay_ms: Of every packet to it and from it.
            loss_percent: Share of packets lost, each way.
        """
        n = len(self._hosts) + 2
        host = Host(f"pl{self._tag}n{n}", f"{self._subnet}.{n}", f"plv{self._tag}n{n}")
        self._hosts.append(host)
        _ip("netns", "add", host.name)
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", host.link, "master", self._bridge, "up")
        inside = ("-n", host.name)
        _ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        if delay_ms or loss_percent:
            netem = ("netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%")
            _run("tc", "qdisc", "add", "dev", host.link, "root", *netem)
            _run("tc", *inside, "qdisc", "add", "dev", "eth0", "root", *netem)
        return host


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
