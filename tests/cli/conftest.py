from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from click.testing import CliRunner, Result

from paceline.v1 import coordinator_pb2 as pb
from services.cli.main import main
from tests.cli import scripted
from tests.cli.scripted import ScriptedCoordinator

Paceline = Callable[..., Result]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch) -> Paceline:
    """Run the command in this process, with standard output and error in pipes."""
    monkeypatch.delenv("PACELINE_ADDRESS", raising=False)
    return lambda *arguments, **options: CliRunner().invoke(main, [str(a) for a in arguments], **options)


@pytest.fixture
def serve() -> Iterator[Callable[[ScriptedCoordinator], str]]:
    """Serve a scripted coordinator until the test ends; return its address."""
    with ExitStack() as stack:
        yield lambda coordinator: stack.enter_context(scripted.serving(coordinator))


@pytest.fixture
def coordinator() -> ScriptedCoordinator:
    return ScriptedCoordinator([*scripted.chunks(), pb.GenerateResponse(result=scripted.result())])


@pytest.fixture
def address(coordinator: ScriptedCoordinator, serve: Callable[[ScriptedCoordinator], str]) -> str:
    return serve(coordinator)
