"""Small models for real processes, and the processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import make_tiny_llama
from tests.support.processes import Processes

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
# For who compares memory. Without them it is bounded too, but grows for longer than a test takes: an arena a thread,
# and what torch prepares for products of every new shape and keeps, 1,024 of them, some 150 MiB.
STEADY = {"MALLOC_ARENA_MAX": "1", "LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target`, `draft`, and `other`: other weights for the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_llama(folder / "target", seed=1, context=4096)
    make_tiny_llama(folder / "draft", seed=1, layers=1, context=4096)
    make_tiny_llama(folder / "other", seed=2, context=4096)
    return folder


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path, OFFLINE) as run:
        yield run
