"""Run the draft worker: `python -m services.draft_worker`, or `paceline draft-worker`."""

from __future__ import annotations

import asyncio

from services.common.rpc.server import configure_logging
from services.common.rpc.settings import command
from services.common.rpc.telemetry import flush_telemetry
from services.draft_worker.app import serve
from services.draft_worker.config import DraftSettings


@command(DraftSettings, name="draft-worker")
def main(settings: DraftSettings) -> None:
    """Serve the drafter: proposed tokens and what each was sampled from."""
    configure_logging(settings.log_level)
    try:
        asyncio.run(serve(settings))
    finally:
        flush_telemetry()


if __name__ == "__main__":
    main()
