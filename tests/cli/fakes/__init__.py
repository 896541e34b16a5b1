"""Services that hold to the contract of a real one and load nothing: LISTENING, health, an orderly end.

`FAKE_<ROLE>` in the environment has one of them misbehave.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from services.common.rpc.logs import configure_logging
from services.common.rpc.server import Server
from services.common.rpc.settings import ServerSettings
from tests.cli import scripted

NAMES = {"coordinator": "CoordinatorService", "draft": "DraftService", "target": "TargetService"}


class _Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await context.send_initial_metadata((("paceline-request-id", "request-7"),))
        for chunk in scripted.chunks():
            yield chunk
        if os.environ.get("FAKE_COORDINATOR") == "endless":
            await asyncio.Event().wait()
        yield pb.GenerateResponse(result=scripted.result())


def run(role: str) -> None:
    """Be one of the three until SIGTERM."""
    behaviour = os.environ.get(f"FAKE_{role.upper()}", "")
    _record(role, os.getpid())
    configure_logging("info")
    logging.getLogger("fake").info("%s got %s", role, " ".join(sys.argv[1:]))
    if behaviour == "fails":
        sys.exit("the model is not there\nmake room and try again")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: _record("told", 0))
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        _record("grandchild", child.pid)
    asyncio.run(_serve(role, behaviour))


def _record(name: str, pid: int) -> None:
    Path(os.environ["FAKE_PIDS"], name).write_text(str(pid))


async def _serve(role: str, behaviour: str) -> None:
    prefix = f"PACELINE_{role.upper()}_"
    settings = {
        "listen": sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index("--listen") + 1],
        **{name: os.environ.get(prefix + name.upper(), "") for name in ("health_listen", "tls_cert", "tls_key")},
    }
    server = Server(ServerSettings.model_validate(settings), [f"paceline.v1.{NAMES[role]}"])
    if role == "coordinator":
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(_Coordinator(), server.grpc)
    stopped = asyncio.Event()
    if behaviour != "stubborn":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await server.listen()
    if behaviour == "dies":
        sys.exit(3)
    if behaviour == "gives up":
        await asyncio.sleep(0.5)
        await server.close()
        await asyncio.sleep(1.0)
        sys.exit("the model is damaged")
    if behaviour != "loads":
        await server.ready()
    await stopped.wait()
    await server.close()
