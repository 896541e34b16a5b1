from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.draft_worker.models import DEFAULT_DRAFT
from tests.real_model.drafts import make_noisy_draft, make_random_draft
from tests.real_model.reference import Reference
from tests.real_model.serving import Serving
from tests.support.models import make_tiny_llama
from tests.support.processes import Processes

PROMPTS: list[str] = [
    json.loads(line)["prompt"]
    for line in Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.fixture(scope="package")
def reference(default_model_dir: Path) -> Reference:
    """transformers by itself."""
    return Reference(default_model_dir)


@pytest.fixture(scope="package")
def serving(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The service in float32."""
    folder = tmp_path_factory.mktemp("real_model")
    drafts = {
        "random": lambda: make_random_draft(default_model_dir, folder / "random"),
        "noisy": lambda: make_noisy_draft(default_model_dir, folder / "noisy", noise=0.05),
        "itself": lambda: default_model_dir,
        "trained": lambda: DEFAULT_DRAFT,
        "other tokenizer": lambda: make_tiny_llama(folder / "other"),
    }
    with Processes(folder) as processes:
        yield Serving(processes, default_model_dir, drafts)
