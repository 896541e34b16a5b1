from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.models import make_tiny_llama
from tests.support.processes import Coordinator, Processes, Service
from tests.tracing.receiver import Receiver


@dataclass(frozen=True)
class Traced:
    """Three processes that export to a receiver."""

    receiver: Receiver
    processes: Processes
    target: Service
    draft: Service
    coordinator: Coordinator


def free_address() -> str:
    """Return an address that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="package")
def traced(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("tracing")
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "200",
    }
    with Processes(folder, env) as processes:

        def page() -> tuple[str, str]:
            return "--metrics-listen", free_address()

        models = [make_tiny_llama(folder / "target", seed=1), make_tiny_llama(folder / "draft", seed=2, layers=1)]
        target = processes.target("--model", str(models[0]), "--worker-id", "target-0", *page())
        draft = processes.draft("--drafter", "model", "--model", str(models[1]), "--worker-id", "draft-0", *page())
        # Whether drafting runs ahead follows the clock, and the tree of spans with it.
        coordinator = processes.coordinator(target, draft, "--worker-id", "coordinator-0", "--overlap", "off")
        yield Traced(receiver, processes, target, draft, coordinator)
