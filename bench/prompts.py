"""The prompts, from Spec-Bench (Xia et al. 2024, github.com/hemingkx/Spec-Bench, Apache-2.0: LICENSE-spec-bench).

`prompts.jsonl` has the first turn of the first question of each of the 13 categories in the development half, in that
file's order, then that of the second question of each, up to 24.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "translation"),
    *("summarization", "qa", "math_reasoning", "rag"),
)
_FILE = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as a person asks it."""

    question_id: int
    category: str
    text: str


def load_prompts(path: Path = _FILE) -> list[Prompt]:
    """Return all prompts in the file's order.

    Args:
        path: JSON lines with `question_id`, `category`, and `text` or, as in Spec-Bench itself, `turns`.

    Raises:
        click.ClickException: A line is no prompt.
    """
    return [_prompt(path, i + 1, line) for i, line in enumerate(path.read_text(encoding="utf-8").splitlines())]


def in_turn(prompts: Sequence[Prompt], categories: Sequence[str], count: int | None = None) -> list[Prompt]:
    """Return `count` prompts, or all of them, one of each category in turn.

    Raises:
        click.ClickException: A category has no prompt, or there are too few in all.
    """
    of = {category: [prompt for prompt in prompts if prompt.category == category] for category in categories}
    if missing := [category for category in categories if not of[category]]:
        raise click.ClickException(f"There is no prompt of the category {missing[0]!r}")
    most = max(len(each) for each in of.values())
    chosen = [of[category][i] for i in range(most) for category in categories if i < len(of[category])]
    if count is not None and len(chosen) < count:
        raise click.ClickException(f"--prompts is {count}: there are {len(chosen)}")
    return chosen[:count]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        read: dict[str, Any] = json.loads(line)
        return Prompt(
            int(read["question_id"]), str(read["category"]), read["text"] if "text" in read else read["turns"][0]
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise click.ClickException(f"{path.name}, line {number} is no prompt: {error!r}") from error
