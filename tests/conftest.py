"""Fixtures that several groups of tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from services.common.engine.default_model import ensure_default_model, paceline_home

# torch's threads spin while they wait for each other, and where something else wants the cores too, a pass takes five
# times as long and more. Read when torch is first imported, here and in the services that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
_SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ
if _SIDE_BY_SIDE:
    # Of several runners none takes the others' cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Folders whose tests share processes, and answers that one has had and the next looks at.
_TOGETHER = ("tests/real_model/", "tests/tracing/")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Keep what shares fixtures on one of several runners: the tests of a file, or of a folder."""

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in _TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])

    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes longest on one runner begin first: the other does all else meanwhile."""
    if _SIDE_BY_SIDE:
        items.sort(key=lambda item: not item.nodeid.startswith("tests/real_model/"))


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model, fetched on first use into $PACELINE_HOME or the user's cache."""
    return ensure_default_model(paceline_home(), report=lambda _: None)
