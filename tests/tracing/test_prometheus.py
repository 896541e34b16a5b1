"""A real Prometheus reads the pages of the three services, answers the dashboard's queries and evaluates the alerts."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.deploy.contract import built, get
from tests.deploy.signals import dashboard_queries
from tests.support.processes import Coordinator
from tests.support.prometheus import tool
from tests.tracing.conftest import Traced, free_address
from tests.tracing.test_metrics_page import page as read_page

PATIENCE_S = 60.0
T = TypeVar("T")
COMPONENTS = ("coordinator", "draft-worker", "target-worker")


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str, **parameters: str) -> Any:
        """Return what its API answers."""
        query = urllib.parse.urlencode(parameters)
        with self._opener.open(f"{self._url}/{path}?{query}", timeout=10) as reply:
            return json.load(reply)["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query."""
        return [float(sample["value"][1]) for sample in self.ask("query", query=query)["result"]]

    def pages_read(self) -> int | str:
        """Return how many pages it reads; what is wrong where it does not answer yet."""
        try:
            return len(self.values("up == 1"))
        except OSError as error:
            return str(error)


@pytest.fixture(scope="module")
def coordinator(traced: Traced) -> Coordinator:
    """One whose numbers are all from here."""
    return traced.processes.coordinator(traced.target, traced.draft, "--metrics-listen", free_address())


@pytest.fixture(scope="module")
def prometheus(
    traced: Traced, coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = tool("prometheus")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    pages = (coordinator.metrics_address, traced.draft.metrics_address, traced.target.metrics_address)
    # As the PodMonitor has it read, and relabelled.
    labels = [{"namespace": "paceline", "pod": f"{name}-0", "app_kubernetes_io_component": name} for name in COMPONENTS]
    targets = [{"targets": [page], "labels": of} for page, of in zip(pages, labels, strict=True)]
    rules = get(built("components/monitoring"), "PrometheusRule", "paceline")["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "paceline", "static_configs": targets}],
        "rule_files": ["rules.yaml"],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = free_address()
    command = [
        *(program, f"--config.file={folder / 'prometheus.yaml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}", "--log.level=warn"),
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            made = Prometheus(address)
            eventually(made.pages_read, lambda found: found == len(pages))
            yield made
        finally:
            process.terminate()


def eventually(
    read: Callable[[], T], is_awaited: Callable[[T], bool], meanwhile: Callable[[], object] = lambda: None
) -> T:
    """Return what is read once it is what is awaited."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_awaited(found := read()):
        assert time.monotonic() < end_s, found
        meanwhile()
        time.sleep(0.2)
    return found


def faults(prometheus: Prometheus) -> dict[str, list[float]]:
    """Return the dashboard's queries whose answers are empty, or no numbers."""
    answers = {query: prometheus.values(query) for query in dashboard_queries("paceline", "20s")}
    return {query: values for query, values in answers.items() if not values or not all(map(math.isfinite, values))}


def test_the_dashboard_has_numbers(coordinator: Coordinator, prometheus: Prometheus) -> None:
    def answers() -> None:
        """Answer in either way, until two readings of the pages have some of it between them."""
        coordinator.generate(text="abcabc", gamma=3, max_tokens=20, stop={"ignore_eos": True})
        coordinator.generate(text="abcabc", max_tokens=20, stop={"ignore_eos": True})

    eventually(lambda: faults(prometheus), lambda found: not found, answers)


def test_the_numbers_are_those_of_the_answers(coordinator: Coordinator, prometheus: Prometheus) -> None:
    def counted() -> list[float]:
        return [sum(prometheus.values(f"paceline_tokens_{kind}_total")) for kind in ("emitted", "tested", "accepted")]

    # Nobody asks it for anything meanwhile, so that what the page says now is what Prometheus will read.
    page = read_page(coordinator.metrics_address)
    before = [page[f"paceline_tokens_{kind}_total"] for kind in ("emitted", "tested", "accepted")]
    stats = coordinator.generate(text="abcabc", gamma=3, max_tokens=30, stop={"ignore_eos": True}).result.speculation
    expected = [old + new for old, new in zip(before, (stats.emitted, stats.tested, stats.accepted), strict=True)]
    eventually(counted, lambda found: found == expected)


def alerts(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]


def test_the_alerts_are_evaluated(prometheus: Prometheus) -> None:
    rules = eventually(lambda: alerts(prometheus), lambda found: {rule["health"] for rule in found} == {"ok"})
    assert len(rules) >= 5
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
