from __future__ import annotations

from pathlib import Path

import click
import pytest

from bench.record import Place, Record, record
from bench.store import Store, read_results
from bench.systems import Outcome
from tests.bench.fakes import measured, one_round, rounds

ABOUT = {"table": "compare", "commit": "abc", "settings": {"tokens": 6, "modes": ["greedy"]}}


def test_what_is_kept_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.jsonl"
    store = Store(path, ABOUT)
    kept = [measured("ours", 50.0, inside=rounds()), measured("theirs", 80.0, streams=4)]
    for each in kept:
        store.add(each)
    about, found = read_results(path)
    assert about == ABOUT
    assert list(found.values()) == kept


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Store(path, ABOUT).add(measured("ours", 50.0))
    other = {**ABOUT, "settings": {"tokens": 7, "modes": ["greedy"]}}
    with pytest.raises(click.ClickException, match="begun with tokens 6, not 7: choose another --out"):
        Store(path, other)
    # Another commit is noted, not refused.
    Store(path, {**ABOUT, "commit": "def"})
    assert '"commit":"def"' in path.read_text()


@pytest.mark.parametrize("text", ["", "no json\n", '{"settings": 1}\n', '{"about":{}}\n{"place":{}}\n'])
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(click.ClickException, match="is no results file of this benchmark"):
        read_results(path)


def test_a_record_sums_up_all_answers_of_a_block() -> None:
    first = Outcome((1, 2, 3, 4), 0.5, 0.1, 2, (one_round(), one_round(65.5, accepted=0, tested=1)), "hash")
    second = Outcome((1, 2, 3, 4), 0.7, 0.3, 1, (one_round(gamma=0, proposed=0, tested=0, accepted=0),), "hash")
    found = record(Place("greedy", 0, "1", "qa", 2), "ours", [5, 6], [first, second], 0.8, 0.001)
    assert (found.wall_ms, found.tokens, found.prompt_tokens) == (800, 8, 11)
    assert (found.first_token_ms, found.decode_ms) == pytest.approx((200, 800))
    assert found.decode_tokens == 2 + 3
    inside = found.rounds
    assert inside is not None
    assert (inside.rounds, inside.proposed, inside.p_rows, inside.p_bytes) == (3, 8, 5 + 5 + 1, 1500)
    assert (inside.tested, inside.accepted) == ((2, 1, 1), (1, 1, 0))
    assert inside.gammas == (1, 0, 0, 0, 2)
    assert inside.ms["between"] == 0.5
    assert Record.read(found.row()) == found
