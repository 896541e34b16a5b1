from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
import pytest

from bench.prompts import CATEGORIES, in_turn, load_prompts


def test_there_are_24_prompts_of_all_13_categories() -> None:
    prompts = load_prompts()
    assert (len(prompts), len({prompt.question_id for prompt in prompts})) == (24, 24)
    assert [prompt.category for prompt in prompts[:13]] == list(CATEGORIES)
    assert set(Counter(prompt.category for prompt in prompts).values()) == {1, 2}
    assert all(prompt.text.strip() for prompt in prompts)
    assert in_turn(prompts, CATEGORIES, 24) == prompts


def test_spec_bench_itself_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": category, "turns": [f"{i}?", "More"]} for i, category in enumerate("aabbb")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(path)
    assert [prompt.text for prompt in in_turn(prompts, "ab", 5)] == ["0?", "2?", "1?", "3?", "4?"]
    assert len(in_turn(prompts, "b")) == 3


def test_a_category_without_a_prompt_is_named() -> None:
    prompts = [prompt for prompt in load_prompts() if prompt.category != "rag"]
    with pytest.raises(click.ClickException, match="There is no prompt of the category 'rag'"):
        in_turn(prompts, CATEGORIES, 2)
    with pytest.raises(click.ClickException, match="--prompts is 30: there are 24"):
        in_turn(load_prompts(), CATEGORIES, 30)


@pytest.mark.parametrize("line", ["{}", "text", '{"question_id": 1, "category": "qa", "turns": []}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "category": "qa", "text": "Why?"}\n' + line + "\n")
    with pytest.raises(click.ClickException, match=r"questions.jsonl, line 2 is no prompt"):
        load_prompts(path)
