"""Run the draft worker: `python -m services.draft_worker`, or `paceline draft-worker`."""

from __future__ import annotations

from services.common.rpc.server import run_process
from services.common.rpc.settings import command
from services.draft_worker.app import serve
from services.draft_worker.config import DraftSettings


@command(DraftSettings, name="draft-worker")
def main(settings: DraftSettings) -> None:
    """Serve the drafter: proposed tokens, each with what it was sampled from."""
    run_process(settings, "paceline-draft-worker", lambda: serve(settings))


if __name__ == "__main__":
    main()
