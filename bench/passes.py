"""Forward passes alone, in this process: `python -m bench passes`.

The engine's pass against transformers' own forward of one position, and both against the floor: the bytes of the
weights over the memory bandwidth, which is measured here too.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from transformers.cache_utils import DynamicCache

from bench.machine import commit, machine, versions
from bench.report import Table
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.runner import Feed, ModelRunner

_RESULTS = Path(__file__).with_name("results")
_SHAPES = ((1, 1), (1, 5), (1, 9), (4, 1), (8, 1), (8, 5), (16, 1), (16, 5))
# Larger than any cache of a CPU.
_BANDWIDTH_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Timed:
    """The passes of one kind.

    Attributes:
        system: Who ran them.
        sessions: In a pass.
        positions: Of each.
        pass_ms: One by one.
    """

    system: str
    sessions: int
    positions: int
    pass_ms: tuple[float, ...]


@click.command()
@click.option("--context", type=click.IntRange(1), default=256, show_default=True, help="Tokens before the pass.")
@click.option("--repeats", type=click.IntRange(3), default=21, show_default=True, help="Passes of each kind.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>-passes.json"
)
@click.option("--compile", "with_compiled", is_flag=True, help="Compiled passes too; takes a minute or so more.")
@click.option("--markdown", is_flag=True, help="Print the table as in docs/benchmarks.md.")
def main(context: int, repeats: int, dtype: Any, out: Path | None, with_compiled: bool, markdown: bool) -> None:
    """Time the engine's passes against transformers' forward of one position, interleaved."""
    started = datetime.datetime.now(datetime.UTC)
    path = out or _RESULTS / f"{started:%Y-%m-%dT%H%M%SZ}-passes.json"
    about = {"commit": commit(), "machine": machine(), "versions": versions()}
    folder = ensure_default_model(paceline_home(), lambda text: click.echo(text, err=True))
    with torch.inference_mode():
        library, ours = (load_model(LoadOptions(str(folder), dtype=dtype)) for _ in range(2))
        weights = _weight_bytes(library)
        passes = {
            **{("transformers", 1, positions): _library_pass(library, context, positions) for positions in (1, 5)},
            **_engine_passes(ours, context),
        }
        if with_compiled:
            passes |= _engine_passes(load_model(LoadOptions(str(folder), dtype=dtype)), context, with_compiled=True)
        timed = _interleave(passes, repeats)
        bandwidth = _bandwidth()
    settings = {"model": ours.model_id, "dtype": ours.dtype, "context": context, "repeats": repeats}
    measured = {"weight_bytes": weights, "bytes_per_s": bandwidth, "passes": [dataclasses.asdict(t) for t in timed]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"settings": settings} | measured, indent=1) + "\n", encoding="utf-8")
    table = _table(timed, floor_ms=weights / bandwidth * 1e3, title=f"A pass in {ours.dtype} after {context} tokens")
    console = Console(highlight=False)
    console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)
    click.echo(f"{weights / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s. Written to {path}", err=True)


def _weight_bytes(loaded: LoadedModel) -> int:
    """Return what a pass has to read of the weights: tied ones once, of the embeddings of the input next to nothing."""
    tensors = {tensor.data_ptr(): tensor for tensor in loaded.model.parameters()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _bandwidth() -> float:
    """Return bytes a second of reading memory, the best of a few tries."""
    block = torch.ones(_BANDWIDTH_BYTES // 4)
    best = 0.0
    for _ in range(8):
        started_s = time.perf_counter()
        block.sum()
        best = max(best, _BANDWIDTH_BYTES / (time.perf_counter() - started_s))
    return best


def _library_pass(loaded: LoadedModel, context: int, positions: int) -> Callable[[], object]:
    cache = DynamicCache(config=loaded.config)
    loaded.model(input_ids=torch.arange(context).unsqueeze(0), cache=cache)
    ids = torch.arange(positions).unsqueeze(0)

    def run() -> None:
        loaded.model(input_ids=ids, cache=cache)
        cache.crop(-positions)

    return run


def _engine_passes(
    loaded: LoadedModel, context: int, with_compiled: bool = False
) -> dict[tuple[str, int, int], Callable[[], object]]:
    most = max(sessions for sessions, _ in _SHAPES)
    room = context + max(positions for _, positions in _SHAPES)
    runner = ModelRunner(loaded)
    runner.prepare(most * room)
    if with_compiled:
        runner.compile()
        if not runner.compiled:
            raise click.ClickException("The passes cannot be compiled here, see above")
    system = "engine, compiled" if with_compiled else "engine"
    for session in range(most):
        runner.run([Feed(session * room, 0, list(range(context)), 1)])
    passes: dict[tuple[str, int, int], Callable[[], object]] = {}
    for sessions, positions in _SHAPES:
        feeds = [Feed(i * room, context, list(range(positions)), positions) for i in range(sessions)]
        passes[system, sessions, positions] = lambda feeds=feeds: runner.run(feeds)  # type: ignore[misc]
    return passes


def _interleave(passes: dict[tuple[str, int, int], Callable[[], object]], repeats: int) -> list[Timed]:
    """Run all kinds in turn: a slow minute of the machine falls on all of them."""
    pass_ms: dict[tuple[str, int, int], list[float]] = {kind: [] for kind in passes}
    for run in passes.values():
        run()
    for _ in range(repeats):
        for kind, run in passes.items():
            started_s = time.perf_counter()
            run()
            pass_ms[kind].append((time.perf_counter() - started_s) * 1e3)
    return [Timed(*kind, tuple(values)) for kind, values in pass_ms.items()]


def _table(timed: Sequence[Timed], floor_ms: float, title: str) -> Table:
    one = np.array(next(t.pass_ms for t in timed if (t.system, t.positions) == ("transformers", 1)))
    rows = [("floor: the weights read once", "", "", f"{floor_ms:.1f}", "", "", "")]
    for each in timed:
        values = np.array(each.pass_ms)
        rows.append(
            (
                *(each.system, str(each.sessions), str(each.positions), f"{np.median(values):.1f}"),
                *(f"{values.min():.1f}", f"{np.median(values / one):.2f}"),
                f"{np.median(values) / floor_ms:.1f}",
            )
        )
    headers = ("pass", "sessions", "positions each", "median ms", "least ms", "to transformers' 1", "to the floor")
    return Table(title, headers, tuple(rows), labels=1)
