from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.engines import StartEngine, engines


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    async with engines() as start:
        yield start
