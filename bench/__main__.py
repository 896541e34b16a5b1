"""Measure: `python -m bench TABLE`; `make bench` is the full comparison."""

from __future__ import annotations

import click

from bench import adaptive, compare, coordinator, drafts, finish, gammas, overlap, passes, streams, tracing, wire


class _Group(click.Group):
    """Runs the comparison where no table is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["compare", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group)
def main() -> None:
    """Measure the service against what people use, and its parts. Without a table: compare.

    A results file is written measurement by measurement: a run that is stopped is gone on with by --out.
    """


main.add_command(compare.main, "compare")
main.add_command(gammas.main, "gammas")
main.add_command(adaptive.main, "adaptive")
main.add_command(wire.main, "wire")
main.add_command(finish.main, "report")
main.add_command(coordinator.main, "coordinator")
main.add_command(drafts.main, "drafts")
main.add_command(overlap.main, "overlap")
main.add_command(passes.main, "passes")
main.add_command(streams.main, "streams")
main.add_command(tracing.main, "tracing")

if __name__ == "__main__":
    main()
