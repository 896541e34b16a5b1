"""Waiting for something to become true, with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.cluster import Cluster

_STEP_S = 0.01


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    for _ in range(int(timeout_s / _STEP_S)):
        if condition():
            return
        await asyncio.sleep(_STEP_S)
    raise AssertionError(f"never: {what}")


async def until_free(cluster: Cluster) -> None:
    """Wait until no session is open at either worker."""
    await until(lambda: cluster.draft.open_streams == cluster.target.open_streams == 0, "both workers are free")


def recheck(cluster: Cluster) -> None:
    """Have the coordinator ask the workers who they are, as it does when it loses one."""
    cluster.coordinator._workers.recheck()
