"""Fixtures that several groups of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.engine.default_model import ensure_default_model, paceline_home

# torch's threads spin while they wait for each other, and where something else wants the cores too, a pass takes five
# times as long and more. Read when torch is first imported, here and in the services that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, fetched on first use into $PACELINE_HOME or the user's cache."""
    return ensure_default_model(paceline_home(), report=lambda _: None)
