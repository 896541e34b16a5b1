from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from paceline.v1 import coordinator_pb2 as pb
from services.cli.client import Answer
from services.cli.output import TokenPrinter
from services.cli.table import closing_table
from services.cli.waterfall import MOST_ROUNDS, new_traceparent, waterfall
from tests.cli import scripted
from tests.cli.conftest import Paceline
from tests.cli.scripted import ScriptedCoordinator

GREEN, RED, CYAN = "\x1b[32m", "\x1b[31m", "\x1b[36m"


def terminal(**options: object) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, color_system="standard", width=80, **options), file  # type: ignore[arg-type]


def answer() -> Answer:
    tokens = [token for response in scripted.chunks() for token in response.chunk.tokens]
    return Answer(tokens=tokens, result=scripted.result(), first_token_s=0.25, total_s=2.0)


def test_a_terminal_gets_each_token_in_the_colour_of_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    console, file = terminal()
    TokenPrinter(console)(answer().tokens)
    written = file.getvalue()
    assert f"{GREEN}Blue\x1b[0m{GREEN} light\x1b[0m" in written
    assert f"{RED} [b]scatters[/b]\x1b[0m" in written
    assert f"{CYAN} \ufffd[31mé\x1b[0m" in written, "the model's own escape sequence must not get through"
    assert re.sub(r"\x1b\[[\d;]*m", "", written) == scripted.TEXT.replace("\x1b", "\ufffd")


def test_no_color_turns_colours_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console, file = terminal()
    TokenPrinter(console)(answer().tokens)
    assert "\x1b" not in file.getvalue()


def table_rows(of: Answer) -> dict[str, list[str]]:
    file = io.StringIO()
    Console(file=file, width=100).print(closing_table(of))
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in file.getvalue().splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def test_the_table_has_the_figures() -> None:
    rows = table_rows(answer())
    assert rows["tokens"][:2] == ["5", "2.50"]
    assert rows["rounds"] == ["2", "", "1 degraded"]
    assert rows["accepted length"][:2] == ["2", "1.00"]
    assert rows["alpha"][0] == "0.67"
    assert rows["alpha"][2].startswith("2 of 3")
    assert rows["tokens/s"][0] == "2.5"
    assert rows["first token"][0] == "250.0 ms"
    assert rows["draft"][:2] == ["20.0 ms", "10.0 ms"]
    assert rows["verify"][:2] == ["160.0 ms", "80.0 ms"]
    assert rows["accept"][:2] == ["10.0 ms", "5.0 ms"]
    assert rows["wire"][:2] == ["8.0 ms", "4.0 ms"]


def test_the_table_has_a_legend_of_the_origins_that_occur() -> None:
    console, file = terminal(no_color=True)
    console.print(closing_table(answer()))
    assert "■ 2 accepted draft   ■ 1 residual   ■ 1 bonus   ■ 1 target" in re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


def test_the_table_of_an_answer_without_rounds() -> None:
    rows = table_rows(Answer(result=pb.GenerateResult(finish_reason=pb.FINISH_REASON_EOS)))
    assert rows["tokens"][:2] == ["0", "0.00"]
    assert rows["verify"][:2] == ["0.0 ms", "0.0 ms"]


def test_the_waterfall_is_drawn_to_scale() -> None:
    width = 14 + 12 + 3 + 30 + 40  # bars of 40 cells for 200 ms: 5 ms a cell
    lines = waterfall(scripted.result(), "ab" * 16, width).plain.splitlines()
    assert lines == [
        f"trace {'ab' * 16} (not traced by this server)",
        "░ wire  ▒ queue  █ work",
        "Generate          200.0 ms │" + "█" * 40 + "│ 2 rounds",
        "├ round 0         100.0 ms │" + "█" * 20 + " " * 20 + "│ 2 of 4 kept, 3 out",
        "│ ├ propose        10.0 ms │██" + " " * 38 + "│ queue 1.0, forward 7.0",
        "│ ├ verify         80.0 ms │  ▒▒▒▒████████████" + " " * 22 + "│ queue 20.0, forward 58.0",
        "│ └ accept          5.0 ms │" + " " * 18 + "█" + " " * 21 + "│",
        "└ round 1         100.0 ms │" + " " * 20 + "█" * 20 + "│ 0 of 0 kept, 1 out, degraded",
        "  ├ propose        10.0 ms │" + " " * 20 + "██" + " " * 18 + "│ queue 1.0, forward 7.0",
        "  ├ verify         80.0 ms │" + " " * 22 + "▒▒▒▒████████████  │ queue 20.0, forward 58.0",
        "  └ accept          5.0 ms │" + " " * 38 + "█ │",
    ]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_waterfall_fits_its_width(width: int) -> None:
    lines = waterfall(scripted.result(rounds=12, trace_id="ab" * 16), "ab" * 16, width).plain.splitlines()
    assert lines[0] == f"trace {'ab' * 16}"
    assert max(map(len, lines[2:])) <= width
    assert len({line.rindex("│") for line in lines[2:]}) == 1


def test_a_long_waterfall_leaves_out_its_middle() -> None:
    lines = waterfall(scripted.result(rounds=MOST_ROUNDS + 7), "ab" * 16, 100).plain.splitlines()
    rounds = [int(match[1]) for line in lines if (match := re.search(r"round (\d+)", line))]
    half = MOST_ROUNDS // 2
    assert rounds == [*range(half), *range(half + 7, MOST_ROUNDS + 7)]
    assert lines.count("┆ 7 rounds left out") == 1


def test_the_waterfall_of_an_answer_without_rounds() -> None:
    assert "Generate" in waterfall(scripted.result(rounds=0), "ab" * 16, 100).plain


def test_trace_asks_for_a_sampled_trace_and_shows_it(
    paceline: Paceline, coordinator: ScriptedCoordinator, address: str
) -> None:
    done = paceline("generate", "--address", address, "--prompt", "a", "--trace")
    version, trace_id, span_id, flags = coordinator.metadata["traceparent"].split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
    text, _, tree = done.stdout.partition(scripted.TEXT + "\n\n")
    assert text == ""
    assert tree.startswith(f"trace {trace_id} ")
    assert "├ round 0" in tree
    assert "\x1b" not in tree
    assert done.stderr == ""


def test_trace_with_json_keeps_standard_output_for_the_object(paceline: Paceline, address: str) -> None:
    done = paceline("generate", "--address", address, "--prompt", "a", "--trace", "--json")
    assert done.stdout.startswith("{")
    assert done.stdout.count("\n") == 1
    assert "├ round 0" in done.stderr


def test_each_trace_has_an_id_of_its_own() -> None:
    assert new_traceparent()[0] != new_traceparent()[0]
