"""Workers that take a known time: a sleep for every draft and for every pass of the target.

`python -m bench.paced --alpha 0.7 --step-ms 10 --pass-ms 50`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

from pydantic import Field

from bench.scripted import DRAFT, TARGET, Context, Script, handlers
from paceline.v1 import draft_pb2, target_pb2
from services.common.rpc.server import Server, run, run_process
from services.common.rpc.settings import ServerSettings, command
from services.common.rpc.worker import Inbox

_VOCAB = 512
_SUPPORT = 64


class PacedSettings(ServerSettings):
    """Settings of the paced workers."""

    env_prefix: ClassVar[str] = "PACELINE_BENCH_"

    alpha: float = Field(0.7, gt=0, le=1, description="Share of the drafts that are kept.")
    step_ms: float = Field(10.0, ge=0, description="Time of a draft.")
    pass_ms: float = Field(50.0, ge=0, description="Time of a pass of the target.")


class Paced:
    """Both workers' streams."""

    def __init__(self, settings: PacedSettings) -> None:
        self._script = Script(_VOCAB, _SUPPORT, settings.alpha)
        self._step_s, self._pass_s = settings.step_ms / 1e3, settings.pass_ms / 1e3

    async def propose(self, requests: AsyncIterator[draft_pb2.ProposeRequest], context: Context) -> None:
        """Send a draft a step; between two of them a newer request takes over."""
        clock = asyncio.get_running_loop().time
        async with Inbox(requests, 3600.0, lambda: None) as inbox:
            async for request, _ in inbox:
                next_s = clock()
                for _ in range(request.gamma):
                    if not inbox.is_empty:
                        break
                    next_s += self._step_s
                    await asyncio.sleep(next_s - clock())
                    await context.write(self._script.draft(request.round))
                await context.write(self._script.proposal(request.round, 0))

    async def verify(self, requests: AsyncIterator[target_pb2.VerifyRequest], context: Context) -> None:
        """Send the rows after a pass."""
        async for request in requests:
            await asyncio.sleep(self._pass_s)
            await context.write(self._script.verification(request.round, request.rows))


@command(PacedSettings, name="paced")
def main(settings: PacedSettings) -> None:
    """Serve both workers' RPCs, each reply in its time."""

    async def nothing() -> None:
        pass

    async def serve() -> None:
        server, paced = Server(settings, [DRAFT, TARGET]), Paced(settings)
        server.grpc.add_generic_rpc_handlers(handlers(_VOCAB, paced.propose, paced.verify))
        await run(server, nothing, nothing)

    run_process(settings, "paced-workers", serve)


if __name__ == "__main__":
    main()
