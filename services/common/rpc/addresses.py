"""What can be told from a gRPC address."""

from __future__ import annotations

import re
from ipaddress import ip_address

_SCHEME = re.compile(r"^(?:dns|ipv4|ipv6|passthrough):(?://[^/]*/)?")


def is_loopback(address: str) -> bool:
    """Return whether an address leads to this machine only, so that nobody else sees what goes there.

    Args:
        address: Of a server, HOST:PORT, or a client's gRPC name: `dns:///name:port`, `ipv4:host:port,host:port`,
            `unix:path`. A host name that is not `localhost` may lead anywhere.
    """
    return is_local_socket(address) or all(_is_loopback_host(part) for part in _SCHEME.sub("", address).split(","))


def is_local_socket(address: str) -> bool:
    """Return whether an address is no HOST:PORT but a socket of this machine."""
    return address.startswith(("unix:", "unix-abstract:"))


def _is_loopback_host(host_and_port: str) -> bool:
    host = host_and_port.rpartition(":")[0] or host_and_port
    if host == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
