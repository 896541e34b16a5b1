from __future__ import annotations

import pytest

from tests.deploy.signals import Series, shown


@pytest.fixture(scope="package")
def pages() -> list[Series]:
    """Return what the services' pages show."""
    return shown()
