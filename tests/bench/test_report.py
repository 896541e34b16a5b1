from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.measure import MODES, Run
from bench.report import Table, setting, tables, write_results
from bench.summary import RATIOS, summarize
from tests.bench.fakes import run


def _runs() -> list[Run]:
    walls = {"paceline": 50.0, "paceline, gamma 0": 125.0, "transformers": 100.0}
    return [
        run(mode, system, wall_ms=wall_ms, question_id=question_id, repeat=repeat, own=2.0 + 2 * repeat)
        for mode in MODES
        for question_id in (1, 2)
        for repeat in (0, 1)
        for system, wall_ms in walls.items()
    ]


def test_figures_of_a_summary() -> None:
    summary = summarize(_runs())
    of = {(each.mode, each.system): each for each in summary.speeds}
    ours = of["greedy", "paceline"]
    assert (ours.tokens_per_s, ours.tokens_per_round, ours.alpha) == pytest.approx((80.0, 2.0, 0.75))
    assert (ours.first_token_ms, ours.equal_answers, ours.idle_cpu_ms) == (30.0, 1.0, None)
    theirs = of["temperature 1", "transformers"]
    assert (theirs.tokens_per_round, theirs.alpha, theirs.equal_answers) == (None, None, None)
    assert theirs.idle_cpu_ms == pytest.approx(5.0)
    times = {(each.system, each.than): each.times.value for each in summary.ratios if each.mode == "greedy"}
    assert [times[pair] for pair in RATIOS] == pytest.approx([0.8, 2.0, 2.5])
    # Rounds of 2 and 3 ms, and in the second repeat of 4 and 5.
    costs = [(each.kind, each.rounds, each.median.own) for each in summary.costs]
    assert costs == [("all", 8, 3.5), ("with drafts", 4, 4.0), ("all", 8, 3.5)] * len(MODES)


def test_tables_say_whether_the_targets_are_met() -> None:
    speeds, ratios, costs = tables(summarize(_runs()))
    assert ("greedy", "paceline, gamma 0", "transformers", "0.80", "0.80 to 0.80", "≥ 1: missed") in ratios.rows
    assert ("greedy", "paceline", "transformers", "2.00", "2.00 to 2.00", "") in ratios.rows
    assert {row[-1] for row in costs.rows} == {"≤ 3: missed"}
    assert ("greedy", "transformers", "40.0", "", "", "", "") in speeds.rows


def test_one_table_for_terminal_and_document() -> None:
    table = Table("Title", ("mode", "system", "ms"), (("greedy", "b", "1.0"),))
    assert table.markdown().splitlines()[2:] == [
        "| mode | system | ms |",
        "| --- | --- | ---: |",
        "| greedy | b | 1.0 |",
    ]
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(table.rich())
    shown = console.export_text()
    assert all(word in shown for word in ("Title", "mode", "greedy", "1.0"))


def test_the_results_file_can_be_read_back(tmp_path: Path) -> None:
    runs = _runs()
    summary = summarize(runs)
    path = tmp_path / "made" / "results.json"
    write_results(path, {"commit": "abc", "settings": {"repeats": 2}}, summary, runs)
    read = json.loads(path.read_text())
    assert (read["commit"], read["settings"]) == ("abc", {"repeats": 2})
    assert len(read["runs"]) == len(runs)
    assert read["runs"][0]["own_ms"] == [2.0, 3.0]
    assert read["runs"][0]["tokens"] == 4
    assert len(read["summary"]["ratios"]) == 6
    assert read["summary"]["costs"][0]["median"]["own"] == 3.5


def test_the_setting_is_one_line() -> None:
    about = {
        "commit": "",
        "started": "2026-01-02T03:04:05Z",
        "machine": {
            "cpu": "Some CPU",
            "cores": 2,
            "cpu_flags": ["avx2"],
            "memory_gib": 8.0,
            "load_before": [0.1, 0.2, 0.3],
            "torch_threads": 2,
        },
        "versions": {"torch": "2.13", "transformers": "5", "grpcio": "1.85", "python": "3.11"},
        "settings": {
            "model": "M",
            "dtype": "bfloat16",
            "prompts": 12,
            "tokens": 64,
            "repeats": 2,
            "took_s": 480.0,
        },
    }
    line = setting(about, "x.json")
    assert line.startswith(
        "M in bfloat16 on Some CPU, 2 cores (avx2), 8.0 GiB, load 0.1 before; torch 2.13 with 2 threads"
    )
    assert line.endswith("12 prompts, 64 tokens each, times 2, in 8 minutes; commit unknown, 2026-01-02, x.json.")
