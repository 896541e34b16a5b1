"""The `paceline` command: a group whose sub-commands are imported when they run."""

from __future__ import annotations

import importlib
import os
from typing import NamedTuple

import click


class Lazy(NamedTuple):
    """Where a sub-command lives, and what the group's help says about it."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "demo": Lazy("services.cli.demo", "demo", "Start everything here, stream one answer, stop everything."),
    "up": Lazy("services.cli.up", "up", "Run the three services on this machine until Ctrl-C."),
    "generate": Lazy("services.cli.generate", "generate", "Stream one answer from a running coordinator."),
    "top": Lazy("services.cli.top", "top", "Watch running pods."),
    "fetch": Lazy("services.cli.fetch", "fetch", "Put a model on disk for workers to come."),
    "distill": Lazy("services.cli.distill", "distill", "Make a draft for a target."),
    "coordinator": Lazy("services.coordinator.__main__", "main", "Run a coordinator."),
    "draft-worker": Lazy("services.draft_worker.__main__", "main", "Run a draft worker."),
    "target-worker": Lazy("services.target_worker.__main__", "main", "Run a target worker."),
}


class LazyGroup(click.Group):
    """Imports only the sub-command that runs: `--help` is quick and `generate` never imports torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return one sub-command."""
        if cmd_name not in COMMANDS:
            return None
        lazy = COMMANDS[cmd_name]
        # gRPC's own notes on connections that end would stand between the answer and the table; read when it loads.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        command: click.Command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of sub-commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"max_content_width": 110})
def main() -> None:
    """Speculative decoding as a service: a cheap draft runs ahead, the target's distribution comes out."""
