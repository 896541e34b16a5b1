from __future__ import annotations

from pathlib import Path

import pytest

from services.common.engine.model import LoadedModel
from tests.support.engines import load
from tests.support.models import make_tiny_llama


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("distill") / "target", layers=3)


@pytest.fixture(scope="session")
def target(folder: Path) -> LoadedModel:
    """The target as transformers runs it; nothing here may change it."""
    return load(folder)
