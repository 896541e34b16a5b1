"""Health for an orchestrator's probes, on a port of its own that serves nothing else and is never encrypted.

Probes speak no TLS and present no certificate. Two names, for two questions:

    alive   SERVING from the first moment to the last: whoever answers need not be restarted
    ready   SERVING while new work is welcome: not while a model loads, and not while the process drains
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.rpc.addresses import is_local_socket
from services.common.specdec.errors import StartupError

ALIVE = "alive"
READY = "ready"
_STATUS = health_pb2.HealthCheckResponse


def add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Have a server listen, in plain text without credentials, and return the address, with the port that it got.

    Raises:
        StartupError: The address cannot be had.
    """
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {address}: is the port taken, or the address not of this machine?"
        ) from None
    return address if is_local_socket(address) else f"{address.rpartition(':')[0]}:{port}"


class Probes:
    """A server that answers `alive` and `ready`.

    Attributes:
        address: Where it listens, once started.
    """

    def __init__(self, listen: str) -> None:
        self._listen = listen
        # Its answers come from the same event loop as the service's: one that is stuck is not alive.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = ""

    async def start(self) -> None:
        """Listen; alive, and not ready.

        Raises:
            StartupError: The address cannot be had.
        """
        await self._health.set(ALIVE, _STATUS.SERVING)
        await self.set_ready(False)
        self.address = add_port(self._server, self._listen)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Say whether new work is welcome."""
        for service in (READY, ""):
            await self._health.set(service, _STATUS.SERVING if ready else _STATUS.NOT_SERVING)

    async def stop(self) -> None:
        """Stop answering. May be called again."""
        await self._server.stop(None)
