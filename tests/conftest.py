"""Fixtures that several groups of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.engine.default_model import ensure_default_model, paceline_home


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, fetched on first use into $PACELINE_HOME or the user's cache."""
    return ensure_default_model(paceline_home(), report=lambda _: None)
