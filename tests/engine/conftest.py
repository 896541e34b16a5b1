from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.common.engine.executor import PassExecutor


@pytest.fixture
def executor() -> Iterator[PassExecutor]:
    executor = PassExecutor()
    yield executor
    executor.close()
