"""The tables: for a terminal, for docs/benchmarks.md, and the results file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table

from bench.measure import Run
from bench.summary import TARGET_ALONE, TRANSFORMERS, Ratio, Summary

_PARTS = ("draft", "wire", "worker", "accept", "rest", "between")
OWN_COST_LIMIT_MS = 3.0
"""Target for the service's own cost of a round."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be shown in several ways. The first `labels` columns are words, the others figures."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 2

    def markdown(self) -> str:
        """Return it as GitHub shows it."""
        rule = ["---"] * self.labels + ["---:"] * (len(self.headers) - self.labels)
        lines = [self.headers, tuple(rule), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def rich(self) -> rich.table.Table:
        """Return it as a terminal shows it."""
        shown = rich.table.Table(title=self.title, title_justify="left", title_style="bold")
        for i, header in enumerate(self.headers):
            shown.add_column(header, justify="left" if i < self.labels else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        return shown


def tables(summary: Summary) -> list[Table]:
    """Return the three tables of a benchmark."""
    return [_speeds(summary), _ratios(summary), _costs(summary)]


def setting(about: Mapping[str, Any], name: str) -> str:
    """Return one sentence on what was measured, where, and in which results file."""
    machine, versions, settings = about["machine"], about["versions"], about["settings"]
    return (
        f"{settings['model']} in {settings['dtype']} on {machine['cpu']}, {machine['cores']} cores "
        f"({', '.join(machine['cpu_flags'])}), {machine['memory_gib']} GiB, load {machine['load_before'][0]} before; "
        f"torch {versions['torch']} with {machine['torch_threads']} threads, transformers {versions['transformers']}, "
        f"grpcio {versions['grpcio']}, Python {versions['python']}; {settings['prompts']} prompts, "
        f"{settings['tokens']} tokens each, times {settings['repeats']}, in {settings['took_s'] / 60:.0f} minutes; "
        f"commit {about['commit'] or 'unknown'}, {about['started'][:10]}, {name}."
    )


def write_results(path: Path, about: dict[str, Any], summary: Summary, runs: Sequence[Run]) -> None:
    """Write the results file: what was measured where, the figures, and a line for each run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**about, "summary": _rounded(dataclasses.asdict(summary), 4)}, indent=1)
    lines = ",\n".join("  " + json.dumps(_row(run), separators=(",", ":")) for run in runs)
    path.write_text(f'{head[:-2]},\n "runs": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def _speeds(summary: Summary) -> Table:
    headers = ("mode", "system", "tokens/s", "first token ms", "tokens a round", "alpha", "equal answers")
    rows = (
        (
            each.mode,
            each.system,
            f"{each.tokens_per_s:.1f}",
            _figure(each.first_token_ms, ".0f"),
            _figure(each.tokens_per_round, ".2f"),
            _figure(each.alpha, ".2f"),
            _figure(each.equal_answers, ".0%"),
        )
        for each in summary.speeds
    )
    return Table("Speed, medians over answers", headers, tuple(rows))


def _ratios(summary: Summary) -> Table:
    rows = (
        (each.mode, each.system, each.than, f"{each.times.value:.2f}", _interval(each), _verdict(each))
        for each in summary.ratios
    )
    headers = ("mode", "system", "against", "times as fast", "95% interval", "target")
    return Table("Ratio of times, geometric mean over pairs", headers, tuple(rows), labels=3)


def _costs(summary: Summary) -> Table:
    shown = ("total", "forward", "own", *_PARTS)
    headers = ("mode", "system", "which", "rounds", "round", "forward", "own", *_PARTS, "own p90", "target")
    rows = (
        (
            each.mode,
            each.system,
            each.kind,
            f"{each.rounds}",
            *(f"{getattr(each.median, name):.2f}" for name in shown),
            f"{each.own_p90:.2f}",
            _met(each.median.own <= OWN_COST_LIMIT_MS, f"≤ {OWN_COST_LIMIT_MS:g}"),
        )
        for each in summary.costs
    )
    return Table("Own cost of a round in ms, medians over rounds", headers, tuple(rows), labels=3)


def _interval(ratio: Ratio) -> str:
    return f"{ratio.times.low:.2f} to {ratio.times.high:.2f}"


def _verdict(ratio: Ratio) -> str:
    if (ratio.system, ratio.than) != (TARGET_ALONE, TRANSFORMERS):
        return ""
    return _met(ratio.times.value >= 1, "≥ 1")


def _met(is_met: bool, target: str) -> str:
    return f"{target}: {'met' if is_met else 'missed'}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _row(run: Run) -> dict[str, Any]:
    row = dataclasses.asdict(run) | {
        "question": run.question.question_id,
        "category": run.question.category,
        "prompt_tokens": len(run.question.ids),
        "tokens": len(run.tokens),
        "rounds": len(run.costs),
    }
    del row["costs"]
    if run.costs:
        row["drafts"] = [cost.drafts for cost in run.costs]
        row["own_ms"] = [cost.own for cost in run.costs]
        row["forward_ms"] = [cost.forward for cost in run.costs]
        row["sums_ms"] = {name: sum(getattr(cost, name) for cost in run.costs) for name in _PARTS}
    return _rounded(row, 2)  # type: ignore[no-any-return]


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    return [_rounded(each, digits) for each in value] if isinstance(value, (list, tuple)) else value
