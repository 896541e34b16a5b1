"""What the tables have in common: their options, the results file, the estimate before and the report at the end."""

from __future__ import annotations

import datetime
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from bench.machine import commit, machine, versions
from bench.measure import MODES, Block, Question, left_of, measure, warm_up
from bench.progress import run_progress
from bench.prompts import Prompt, in_turn, load_prompts
from bench.start import Arguments
from bench.store import Store
from bench.systems import System
from services.common.engine.model import LoadedModel
from services.draft_worker.models import DEFAULT_DRAFT

T = TypeVar("T")

RESULTS = Path(__file__).with_name("results")
_QUIET_LOAD = 0.5
# A pass over a prompt feeds some twenty positions in the time that a token takes.
_PROMPT_TOKENS_IN_A_TOKEN = 20
# Answers written at a time share passes: so many times as fast as one by one, at the most.
_SHARED = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What every table is told; None and empty are defaults of its own.

    Attributes:
        quick: Take the least of everything that is not given.
        prompts: How many.
        prompts_file: Where they are; None for those that come with the benchmark.
        tokens: Of every answer.
        repeats: How often everything is run.
        modes: Keys of MODES.
        target: The model: `default`, a folder, a hub id.
        draft: A trained draft; None for the default target's own, and for another target n-gram lookup alone.
        lookup_alone: No trained draft, for the default target neither.
        draft_args: More arguments of the draft worker's command.
        target_args: Of the target worker's.
        coordinator_args: Of the coordinator's.
        out: Results file.
        markdown: Print the tables as in docs/benchmarks.md.
        figures: Folder of the plots.
    """

    quick: bool
    prompts: int | None
    prompts_file: Path | None
    tokens: int | None
    repeats: int | None
    modes: tuple[str, ...]
    target: str
    draft: Path | None
    lookup_alone: bool
    draft_args: str
    target_args: str
    coordinator_args: str
    out: Path | None
    markdown: bool
    figures: Path | None

    def choose(self, given: T | None, quick: T, full: T) -> T:
        """Return what is given, else the default."""
        return given or (quick if self.quick else full)

    def asked(self, categories: Sequence[str], quick: int, full: int | None) -> list[Prompt]:
        """Return the prompts, one of each category in turn; None is all of them."""
        every = load_prompts(self.prompts_file) if self.prompts_file else load_prompts()
        return in_turn(every, categories, self.choose(self.prompts, quick, full))

    def services(
        self, *, coordinator: Sequence[str] = (), draft: Sequence[str] = (), target: Sequence[str] = ()
    ) -> Arguments:
        """Return the arguments of the three commands; those given here are the table's own, and the user's win.

        Prefix reuse is off: nothing is to be carried over from one answer to the next, as in transformers' generate.
        """
        trained = ("--drafter", "model", "--model", str(self.draft)) if self.draft else ()
        of = ("--target-model", self.target) if self.draft and self.target != "default" else ()
        # As `paceline up` serves it.
        looks_up = ("--ngram-first", "3") if self.draft == DEFAULT_DRAFT else ()
        return Arguments(
            coordinator=(*coordinator, *shlex.split(self.coordinator_args)),
            draft=(*trained, *of, *looks_up, *draft, *shlex.split(self.draft_args)),
            target=("--model", self.target, "--no-prefix-reuse", *target, *shlex.split(self.target_args)),
        )

    def settings(self) -> dict[str, Any]:
        """Return what is noted of the services; of a folder its name alone, for a path means nothing elsewhere."""
        given = {name: getattr(self, name) for name in ("draft_args", "target_args", "coordinator_args")}
        return {"draft": self.draft.resolve().name if self.draft else "", **given}

    def path(self, table: str) -> Path:
        """Return where the results go."""
        return self.out or RESULTS / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H%M%SZ}-{table}.jsonl"


def options(*, prompts: int, tokens: int, repeats: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that every table has, with its defaults in their help, and hand them over as `Options`."""
    added = (
        click.option("--quick", is_flag=True, help="A look, in minutes: few prompts, one repeat."),
        click.option("--prompts", type=click.IntRange(1), help=f"Default: {prompts}, one of each category in turn."),
        click.option(
            "--prompts-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON lines."
        ),
        click.option("--tokens", type=click.IntRange(2), help=f"Of every answer. Default: {tokens}"),
        click.option("--repeats", type=click.IntRange(1), help=f"How often everything is run. Default: {repeats}"),
        click.option("--mode", "modes", type=click.Choice(list(MODES)), multiple=True, help="Default: all."),
        click.option("--target", default="default", show_default=True, help="The model: a folder, a hub id."),
        click.option(
            "--draft",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="A trained draft. Default: the default target's own, for that target.",
        ),
        click.option("--lookup-alone", is_flag=True, help="N-gram lookup and no trained draft."),
        click.option(
            "--draft-args", default="", help="More of the draft worker's command: '--ngram-first 3 --threads 1'."
        ),
        click.option("--target-args", default="", help="More of the target worker's command."),
        click.option("--coordinator-args", default="", help="More of the coordinator's command."),
        click.option(
            "--out", type=click.Path(dir_okay=False, path_type=Path), help="One that is there is gone on with."
        ),
        click.option("--markdown", is_flag=True, help="Print the tables as in docs/benchmarks.md."),
        click.option(
            "--figures", type=click.Path(file_okay=False, path_type=Path), help="Default: beside the results."
        ),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def called(**given: Any) -> None:
            if given["draft"] is None and given["target"] == "default" and not given["lookup_alone"]:
                given["draft"] = DEFAULT_DRAFT
            common = Options(**{name: given.pop(name) for name in Options.__slots__})
            function(common, **given)

        for option in reversed(added):
            called = option(called)
        return called

    return decorate


def about(table: str, loaded: LoadedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is measured, and where."""
    model = {"model": loaded.model_id, "dtype": loaded.dtype, "weights_hash": loaded.weights_hash}
    return {
        "table": table,
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {**model, **settings},
    }


async def run(
    store: Store, systems: Sequence[System], planned: Sequence[Block], first: Question, weights_hash: str
) -> None:
    """Measure what the store does not have yet; say before how long that will take.

    Args:
        store: Keeps the measurements.
        systems: What to compare.
        planned: What they are to do in all.
        first: A question to warm up with.
        weights_hash: Of the model that all have to use.
    """
    left = left_of(store, planned, systems)
    if not left:
        return
    seconds = await warm_up(systems, first, list(dict.fromkeys(block.place.mode for block in planned)))
    total = len(left) * len(systems)
    click.echo(
        f"{total} runs of {len(planned) * len(systems)} to do, about {_duration(_estimate_s(left, seconds))}."
        " Leave the machine alone; a run that is stopped is gone on with by the same command and --out",
        err=True,
    )
    _warn(store.about["machine"])
    with run_progress(total) as on_step:
        await measure(store, systems, left, weights_hash=weights_hash, on_step=on_step)


def _estimate_s(left: Sequence[Block], seconds: Mapping[str, float]) -> float:
    """Return how long the blocks will take, from what a token took each system when it warmed up."""
    tokens = sum(
        sum(job.tokens + len(job.prompt) / _PROMPT_TOKENS_IN_A_TOKEN for job in block.jobs)
        / min(len(block.jobs), _SHARED)
        for block in left
    )
    return tokens * sum(seconds.values())


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{max(minutes, 1)} min"


def _warn(machine: Mapping[str, Any]) -> None:
    load, cores = machine["load_before"][0], machine["cores"]
    if load > _QUIET_LOAD * cores:
        click.echo(f"Not to be relied on: other work was running before (load {load} on {cores} cores)", err=True)
