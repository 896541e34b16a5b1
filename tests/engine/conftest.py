from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.engines import Library, StartEngine, engines
from tests.support.models import make_tiny_llama


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    async with engines() as start:
        yield start


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def library(llama_folder: Path) -> Library:
    return Library(llama_folder)
