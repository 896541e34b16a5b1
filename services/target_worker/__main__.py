"""Run the target worker: `python -m services.target_worker`, or `paceline target-worker`."""

from __future__ import annotations

from collections.abc import Coroutine

from services.common.rpc.server import run_process
from services.common.rpc.settings import command
from services.target_worker.config import TargetSettings


@command(TargetSettings, name="target-worker")
def main(settings: TargetSettings) -> None:
    """Serve the target model: its distribution after each drafted token."""

    def serve() -> Coroutine[None, None, None]:
        # torch takes seconds to import: --help and a wrong flag should not wait for it.
        from services.target_worker.app import serve as serve_target

        return serve_target(settings)

    run_process(settings, "paceline-target-worker", serve)


if __name__ == "__main__":
    main()
