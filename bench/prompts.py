"""The prompts, from Spec-Bench (Xia et al. 2024, github.com/hemingkx/Spec-Bench, Apache-2.0: LICENSE-spec-bench).

`prompts.jsonl` has the first turn of the first question of each category in the development half, in that file's order;
`math` is left out, for `math_reasoning` is the same kind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, as a person asks it."""

    question_id: int
    category: str
    text: str


def load_prompts() -> list[Prompt]:
    """Return all prompts in the file's order."""
    return [Prompt(**json.loads(line)) for line in _FILE.read_text(encoding="utf-8").splitlines()]
