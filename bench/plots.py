"""The plots of a results file, by the names of their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.adaptive_report import ADAPTIVE, best_fixed
from bench.compare_report import OURS, SYSTEMS, TARGET_ALONE
from bench.gammas_report import points
from bench.phases import PHASES
from bench.record import Record
from bench.summary import chosen, median, names, sums, whole_ms
from services.common.specdec.analysis import expected_speedup

_WIDTH = 9.0
_ROW = 2.6


def compare(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw speed by system and category, drafts kept by position, and the phases of a round."""
    return {"speed": _speed(records), "positions": _positions(records), "phases": _phases(records)}


def gammas(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw the speed-up over gamma, with the formula's curve beside it."""
    figure, axes = _figure([*dict.fromkeys(each.mode for each in points(records))])
    for mode, axis in axes.items():
        here = [each for each in points(records) if each.mode == mode]
        gamma = [each.gamma for each in here]
        value = np.array([each.measured.value for each in here])
        bounds = np.array([[each.measured.low for each in here], [each.measured.high for each in here]])
        axis.errorbar(gamma, value, np.abs(bounds - value), fmt="o", capsize=3, label="measured")
        axis.plot(gamma, [each.formula for each in here], label="formula, alpha, c and r of each gamma")
        alpha, draft, wire = (np.mean([getattr(each, name) for each in here]) for name in _CONSTANTS)
        curve = np.linspace(min(gamma), max(gamma), 50)
        speedup = [expected_speedup(float(alpha), g, float(draft), float(wire)) for g in curve]
        axis.plot(curve, speedup, linestyle=":", label=f"formula, alpha {alpha:.2f}, c {draft:.3f}, r {wire:.3f}")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xlabel="gamma", xticks=gamma, ylabel="times as fast as gamma 0", title=mode)
        axis.legend()
    return {"speedup": figure}


def adaptive(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw the chosen gamma's speed over the best fixed one's, by category and streams."""
    figure, axes = _figure(names(each.place.mode for each in records))
    kinds = names(each.place.category for each in records)
    streams = sorted({each.place.streams for each in records})
    for mode, axis in axes.items():
        for i, count in enumerate(streams):
            heights = [_share(chosen(records, mode=mode, category=kind, streams=count)) for kind in kinds]
            axis.bar(
                np.arange(len(kinds)) + (i + 0.5) / (len(streams) + 1),
                heights,
                0.9 / (len(streams) + 1),
                label=f"{count}",
            )
        axis.axhline(0.97, color="grey", linewidth=0.8)
        _categories(axis, kinds)
        axis.set(ylabel="speed, adaptive / best fixed", title=mode)
        axis.legend(title="streams", ncols=3)
    return {"adaptive": figure}


_CONSTANTS = ("alpha", "draft_cost", "wire_cost")


def _speed(records: Sequence[Record]) -> Figure:
    figure, axes = _figure(names(each.place.mode for each in records))
    kinds = names(each.place.category for each in records)
    systems = [system for system in SYSTEMS if chosen(records, system=system)]
    for mode, axis in axes.items():
        for i, system in enumerate(systems):
            found = [chosen(records, mode=mode, system=system, category=kind) for kind in kinds]
            speeds = [1e3 / median(each, whole_ms) if each else 0.0 for each in found]
            axis.bar(
                np.arange(len(kinds)) + (i + 0.5) / (len(systems) + 1), speeds, 0.9 / (len(systems) + 1), label=system
            )
        _categories(axis, kinds)
        axis.set(ylabel="tokens/s", title=mode)
    handles, labels = next(iter(axes.values())).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize="small", ncols=3)
    return figure


def _positions(records: Sequence[Record]) -> Figure:
    figure, axes = _figure(["accepted per position"])
    axis = axes["accepted per position"]
    for mode in names(each.place.mode for each in records):
        rounds = sums(chosen(records, mode=mode, system=OURS))
        if rounds is not None and rounds.tested:
            kept = [
                accepted / tested for accepted, tested in zip(rounds.accepted, rounds.tested, strict=True) if tested
            ]
            axis.plot(range(1, len(kept) + 1), kept, marker="o", label=mode)
    axis.set(xlabel="position in the round", ylabel="drafts kept / tested", ylim=(0, 1))
    if axis.lines:
        axis.legend()
    return figure


def _phases(records: Sequence[Record]) -> Figure:
    figure, axes = _figure(["time of a round by phase"])
    axis = axes["time of a round by phase"]
    cells = [(mode, system) for mode in names(each.place.mode for each in records) for system in (OURS, TARGET_ALONE)]
    found = {cell: sums(chosen(records, mode=cell[0], system=cell[1])) for cell in cells}
    bars = {f"{mode}\n{system}": rounds for (mode, system), rounds in found.items() if rounds is not None}
    begin = np.zeros(len(bars))
    for name in PHASES:
        lengths = np.array([rounds.ms[name] / rounds.rounds for rounds in bars.values()])
        axis.barh(list(bars), lengths, left=begin, label=name)
        begin += lengths
    axis.invert_yaxis()
    axis.set(xlabel="ms")
    axis.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.set_figheight(1.2 + 0.6 * len(bars))
    return figure


def _share(here: Sequence[Record]) -> float:
    best, mine = best_fixed(here), chosen(here, system=ADAPTIVE)
    return median(chosen(here, system=best), whole_ms) / median(mine, whole_ms) if best and mine else 0.0


def _figure(titles: Sequence[str]) -> tuple[Figure, dict[str, Any]]:
    """Return a figure with one row for each title."""
    figure = Figure(figsize=(_WIDTH, _ROW * max(len(titles), 1) + 0.8), layout="constrained")
    axes = np.atleast_1d(figure.subplots(max(len(titles), 1)))
    for title, axis in zip(titles, axes, strict=False):
        axis.set_title(title)
    return figure, dict(zip(titles, axes, strict=False))


def _categories(axis: Any, kinds: Sequence[str]) -> None:
    axis.set_xticks(np.arange(len(kinds)) + 0.4, kinds, rotation=30, ha="right")
