"""Figures, tables, verdicts and plots of every kind of results file."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image
from rich.console import Console

from bench import adaptive_report, compare_report, gammas_report, wire_report
from bench.__main__ import main
from bench.compare_report import ASSISTED, GENERATE, LOOKUP, OURS, TARGET_ALONE
from bench.gammas_report import points
from bench.record import Record
from bench.report import Table, not_slower, setting
from bench.statistics import Interval
from bench.store import Store
from bench.summary import decode_ms, ratio, total_ratio, whole_ms
from services.common.specdec.analysis import expected_speedup
from tests.bench.fakes import measured, rounds

ABOUT = {
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
    "settings": {"model": "M", "dtype": "bfloat16", "draft": "", "tokens": 16, "repeats": 2},
}
KINDS = ("writing", "qa")


def compared(category_ms: float = 50.0) -> list[Record]:
    """Ours is twice as fast as the target alone; in the category qa as fast as is said."""
    walls = {OURS: 50.0, TARGET_ALONE: 100.0, GENERATE: 140.0, ASSISTED: 150.0, LOOKUP: 120.0}
    inside = {OURS: rounds(), TARGET_ALONE: rounds(count=16, gamma=0, kept=0, draft_pass_ms=0.0)}
    return [
        measured(
            system,
            (category_ms if (system, kind) == (OURS, "qa") else wall_ms) * (1 + repeat / 10),
            mode=mode,
            repeat=repeat,
            unit=kind,
            category=kind,
            inside=inside.get(system),
            answer="ours" if system == OURS and kind == "qa" else "same",
        )
        for mode in ("greedy", "temperature 1")
        for repeat in (0, 1)
        for kind in KINDS
        for system, wall_ms in walls.items()
    ]


def fixed() -> list[Record]:
    """Gamma 0 and 4: 16 rounds of 22 ms each, and 4 rounds of 27."""
    found = []
    for gamma, wall_ms in ((0, 100.0), (4, 60.0)):
        count = 16 if gamma == 0 else 4
        inside = rounds(count=count, gamma=gamma, kept=3 if gamma else 0, draft_pass_ms=4.0 if gamma else 0.0)
        found += [measured(f"gamma {gamma}", wall_ms, unit=unit, inside=inside) for unit in ("1", "2")]
    return found


def adapted(ours_ms: float) -> list[Record]:
    walls = {"gamma 0": 100.0, "gamma 1": 80.0, "gamma 4": 90.0, "adaptive": ours_ms}
    return [
        measured(system, wall_ms, repeat=repeat, unit="qa", category="qa", streams=streams, inside=rounds())
        for streams in (1, 8)
        for repeat in range(5)
        for system, wall_ms in walls.items()
    ]


def wired() -> list[Record]:
    dense, thin = rounds(), rounds()
    rows = {wire_report.DENSE: (dense, 100.0), wire_report.THIN: (thin, 90.0), wire_report.COUPLED: (thin, 130.0)}
    return [measured(system, wall_ms, inside=inside) for system, (inside, wall_ms) in rows.items()]


def row(table: Table, *begins: str) -> tuple[str, ...]:
    (found,) = [each for each in table.rows if each[: len(begins)] == begins]
    return found


def test_ratios_are_of_pairs_and_leave_out_what_has_none() -> None:
    a = [
        measured("a", wall, unit=unit, repeat=i)
        for unit, walls in (("1", (40.0, 60.0)), ("2", (10.0,)))
        for i, wall in enumerate(walls)
    ]
    b = [
        measured("b", wall, unit=unit, repeat=i)
        for unit, walls in (("1", (20.0, 1.0)), ("2", (10.0,)), ("3", (9.0,)))
        for i, wall in enumerate(walls)
    ]
    times = ratio(a, b, whole_ms)
    assert times is not None
    # The second repeat of the first prompt has no counterpart of the second prompt yet; the third has no pair.
    assert times.value == pytest.approx(2**0.5)
    assert ratio(a, [], whole_ms) is None
    assert total_ratio(a, b, whole_ms) == pytest.approx((50 + 10) / (10.5 + 10))
    # 40 ms, of which 8 to the first token; 15 of 16 tokens come after it.
    assert decode_ms(a[0]) == pytest.approx(32 / 15)


def test_the_comparison_and_its_targets() -> None:
    speeds, ratios, categories, positions, phases = compare_report.tables(compared())
    ours = row(speeds, "greedy", OURS)
    assert ours[2] == f"{16 / 52.5e-3:.1f}"
    assert ours[5:] == ("4.00", "0.75", "50%", "1.0%")
    assert row(speeds, "temperature 1", TARGET_ALONE)[5:8] == ("1.00", "", "")
    assert row(ratios, "greedy", OURS, TARGET_ALONE)[3:] == (
        *("2.00", "2.00 to 2.00", "2.00", "2.00", "2.00 to 2.00", "≥ 1.5: met"),
    )
    assert row(ratios, "greedy", OURS, GENERATE)[-1] == "≥ 2.5: met"
    assert row(ratios, "greedy", OURS, LOOKUP)[-1] == ""
    assert row(categories, "greedy", "qa")[-4:] == ("0.75", "2.00", "2.00 to 2.00", "≥ 0.97: met")
    assert row(positions, "greedy", "kept") == ("greedy", "kept", "100%", "100%", "100%", "0%")
    assert row(phases, "greedy", OURS)[2:] == (
        *("16", "4.00", "0.50", "20.00", "1.00", "0.25", "0.25", "0.50", "2.00", "0%", "0%", "≤ 3: met"),
    )


def test_targets_that_are_missed_are_said_to_be() -> None:
    _, ratios, categories, *_ = compare_report.tables(compared(category_ms=110.0))
    # The mean over categories: sqrt(2 * 0.91).
    assert row(ratios, "greedy", OURS, TARGET_ALONE)[3] == "1.35"
    assert row(ratios, "greedy", OURS, TARGET_ALONE)[-1] == "≥ 1.5: missed"
    assert row(categories, "greedy", "qa")[-1] == "≥ 0.97: missed"
    assert row(categories, "greedy", "writing")[-1] == "≥ 0.97: met"
    assert not_slower(Interval(0.96, 0.94, 0.98)) == "≥ 0.97: within noise"


def test_a_comparison_that_has_only_begun_has_tables() -> None:
    assert [len(table.rows) for table in compare_report.tables(compared()[:1])] == [1, 0, 0, 2, 1]


def test_the_formula_has_what_was_measured() -> None:
    (point,) = points(fixed())
    # A round of gamma 0 is 22.5 ms, 2.5 of them besides the pass; so is that of gamma 4, with 4 ms for its drafts.
    assert (point.gamma, point.alpha, point.tokens, point.pass_cost) == (4, 0.75, 4.0, 1.0)
    assert (point.draft_cost, point.wire_cost) == pytest.approx((1 / 22.5, 0.0))
    assert point.formula == expected_speedup(0.75, 4, 1 / 22.5)
    (table,) = gammas_report.tables(fixed())
    assert row(table, "greedy", "4")[-1] == "≥ 0.9: missed"


@pytest.mark.parametrize(("ours_ms", "says"), [(80.0, "≥ 0.97: met"), (90.0, "≥ 0.97: missed")])
def test_the_chosen_gamma_is_held_against_the_best_fixed_one(ours_ms: float, says: str) -> None:
    (table,) = adaptive_report.tables(adapted(ours_ms))
    found = row(table, "greedy", "8", "qa")
    assert (found[3], found[6]) == ("gamma 1", "4.0")
    assert found[-6:] == (f"{80 / ours_ms:.2f}", *found[-5:-4], says, f"{100 / ours_ms:.2f}", found[-2], "≥ 0.97: met")


def test_bytes_and_alpha() -> None:
    records = wired()
    (table,) = wire_report.tables(records)
    assert row(table, "greedy", wire_report.DENSE)[2:7] == ("5.0", "100.0%", "", "0.4", "0.0%")
    thin = row(table, "greedy", wire_report.THIN)
    assert (thin[4], thin[7], thin[9], thin[-1]) == ("≤ 5%: missed", "0.750", "1.11", "≥ 0.97: met")
    assert row(table, "greedy", wire_report.COUPLED)[-1] == "≥ 0.97: missed"


@pytest.mark.parametrize(
    ("kind", "records", "plots"),
    [
        ("compare", compared, ["phases", "positions", "speed"]),
        ("gammas", fixed, ["speedup"]),
        ("adaptive", lambda: adapted(85.0), ["adaptive"]),
        ("wire", wired, []),
    ],
)
def test_a_results_file_becomes_tables_and_plots(
    kind: str, records: Callable[[], list[Record]], plots: list[str], tmp_path: Path
) -> None:
    store = Store(tmp_path / "results.jsonl", {"table": kind, **ABOUT})
    for each in records():
        store.add(each)
    figures = tmp_path / "figures"
    arguments = ["report", str(tmp_path / "results.jsonl"), "--markdown", "--figures", str(figures)]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "| mode |" in result.output
    assert sorted(path.stem for path in figures.iterdir()) == plots
    for path in figures.iterdir():
        with Image.open(path) as image:
            # Something is drawn: not all of it is white.
            assert image.convert("L").getextrema() != (255, 255)


def test_a_file_without_measurements_says_so(tmp_path: Path) -> None:
    Store(tmp_path / "results.jsonl", {"table": "compare", **ABOUT})
    result = CliRunner().invoke(main, ["report", str(tmp_path / "results.jsonl")])
    assert result.exit_code == 1
    assert "has no measurement yet" in result.output


def test_without_a_table_the_comparison_is_run() -> None:
    help_of = {name: CliRunner().invoke(main, [*name, "--help"]).output for name in ((), ("compare",), ("--quick",))}
    assert "--lookup-tokens" in help_of["compare",]
    assert "--lookup-tokens" in help_of["--quick",]
    assert "adaptive" in help_of[()]


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


def test_the_setting_is_one_line() -> None:
    line = setting(ABOUT, "x.jsonl")
    assert line.startswith(
        "M in bfloat16 on Some CPU, 2 cores (avx2), 8.0 GiB, load 0.1 before; torch 2.13 with 2 threads"
    )
    assert line.endswith("draft: n-gram lookup; 16 tokens an answer, 2 repeats; commit unknown, 2026-01-02, x.jsonl.")
