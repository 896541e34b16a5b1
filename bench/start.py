"""The services with the default model, and the same model in this process for transformers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench.measure import Question
from bench.prompts import Prompt
from services.cli.cluster import Cluster, local_cluster
from services.cli.progress import progress
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import LoadedModel, LoadOptions, load_model

_HOME = "PACELINE_HOME"


async def start_and_load(
    stack: contextlib.AsyncExitStack, prompts: Sequence[Prompt]
) -> tuple[Cluster, LoadedModel, list[Question]]:
    """Start the services with their defaults, for as long as the stack; load the model; tokenise the prompts."""
    with progress() as report:
        cluster = await stack.enter_async_context(local_cluster([], [], [], _environment(), report))
        report("loading the model for transformers")
        folder = ensure_default_model(paceline_home(), report)
        return cluster, load_model(LoadOptions(str(folder))), _questions(folder, prompts)


def _environment() -> dict[str, str]:
    """Return this environment without the services' settings: what is measured is their defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_") or name == _HOME}


def _questions(folder: Path, prompts: Sequence[Prompt]) -> list[Question]:
    """Return the prompts in the model's chat template, tokenised once for all systems."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    questions = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        questions.append(Question(prompt.question_id, prompt.category, tuple(ids)))
    return questions
