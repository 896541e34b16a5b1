"""`paceline up`: the three services on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import click

from services.cli.cluster import local_cluster
from services.cli.interrupt import run
from services.cli.pages import LOCAL_PAGES
from services.cli.progress import progress

DTYPES = ("auto", "float32", "bfloat16", "float16")
# By these the pair of models may be another than the default one.
_SET_ELSEWHERE = frozenset({"PACELINE_TARGET_MODEL", "PACELINE_DRAFT_DRAFTER", "PACELINE_DRAFT_MODEL"})
# Whether the default draft looks up first, where it is said elsewhere.
_LOOK_UP = "PACELINE_DRAFT_NGRAM_FIRST"


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="The coordinator's address.  [default: a free port on loopback]")
@click.option("--model", help="Target: local folder, hub id, GGUF file.  [default: SmolLM2-135M-Instruct]")
@click.option("--dtype", type=click.Choice(DTYPES), help="Precision of the models.  [default: auto]")
@click.option(
    "--drafter",
    type=click.Choice(("ngram", "model")),
    help="Kind of draft.  [default: model if there is one, else ngram]",
)
@click.option(
    "--draft-model", metavar="MODEL", help="Draft model.  [default: the default target's own, for that target]"
)
@click.option("--gamma", type=int, help="Drafts in a round where a request does not say.  [default: what pays]")
@click.option(
    "--compile", "compiles", is_flag=True, help="Faster passes: needs a C++ compiler, at first a minute more."
)
@click.option("--verbose", is_flag=True, help="Show the services' logs.")
def up(verbose: bool, **choices: Any) -> None:
    """Run the three services on this machine until Ctrl-C.

    Prints READY and the coordinator's address once it serves. Every other setting of a service reaches it by its
    environment variable: see the --help of coordinator, draft-worker and target-worker. A service that ends is not
    started again: the others are stopped too, and the exit code is 1. `paceline top` watches them.
    """
    run(_up(service_arguments(**choices), verbose))


def service_arguments(
    *,
    listen: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    drafter: str | None = None,
    draft_model: str | None = None,
    gamma: int | None = None,
    compiles: bool = False,
) -> tuple[list[str], list[str], list[str]]:
    """Return the arguments of the coordinator, the draft worker and the target worker; None leaves a setting to them.

    Raises:
        click.UsageError: A draft model for a drafter that has none.
    """
    if draft_model is not None and drafter == "ngram":
        raise click.UsageError("--draft-model is for --drafter model, not ngram.")
    if draft_model is None and model is None and drafter != "ngram" and not _SET_ELSEWHERE & os.environ.keys():
        draft_model = "default"
    if draft_model is not None:
        drafter = "model"
    # Guesses cost nothing where they are kept, and are left alone where they are not.
    looks_up = draft_model == "default" and _LOOK_UP not in os.environ
    return (
        [*_flags(listen=listen, default_gamma=gamma), *([] if gamma is None else ["--no-adaptive-gamma"])],
        [
            *_flags(drafter=drafter, model=draft_model, dtype=dtype, ngram_first=3 if looks_up else None),
            *(["--compile"] if compiles and drafter == "model" else []),
        ],
        [*_flags(model=model, dtype=dtype), *(["--compile"] if compiles else [])],
    )


def _flags(**settings: object) -> list[str]:
    given = {name: value for name, value in settings.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def metrics_pages(env: Mapping[str, str]) -> list[str]:
    """Return where the three services are to have their metrics pages.

    Where `paceline top` looks by itself, if nothing else is there; what the environment says is left as it is.
    """
    kinds = ("COORDINATOR", "DRAFT", "TARGET")
    said = [env.get(f"PACELINE_{kind}_METRICS_LISTEN", "") for kind in kinds]
    return [given or _free(address) for given, address in zip(said, LOCAL_PAGES, strict=True)]


def _free(address: str) -> str:
    """Return an address if nobody listens there, else one on a free port."""
    host, _, port = address.rpartition(":")
    for tried in (int(port), 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            # As the page's own server does: a port whose last connections are just ending is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, tried))
            return f"{host}:{probe.getsockname()[1]}"
    raise click.ClickException(f"no port is free on {host}")


async def _up(arguments: tuple[list[str], list[str], list[str]], verbose: bool) -> None:
    pages = metrics_pages(os.environ)
    for service, page in zip(arguments, pages, strict=True):
        service += ["--metrics-listen", page]
    async with contextlib.AsyncExitStack() as stack:
        with progress(moving=not verbose) as report:
            cluster = await stack.enter_async_context(local_cluster(*arguments, os.environ, report, verbose=verbose))
        click.echo(f"READY {cluster.address}")
        if sys.stderr.isatty():
            click.echo(f'try: paceline generate --address {cluster.address} --chat "..."; Ctrl-C stops all', err=True)
        if sys.stderr.isatty() or pages != list(LOCAL_PAGES):
            click.echo(" ".join(["watch: paceline top", *(pages if pages != list(LOCAL_PAGES) else ())]), err=True)
        # Until a signal, or a service's end.
        await cluster.run(_for_ever())


async def _for_ever() -> None:
    await asyncio.Event().wait()
