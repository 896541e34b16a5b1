"""What autoscaling goes by: the metrics that its objects name, and those that the code's pages show."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

from deploy.check import K8S

Document = dict[str, Any]
ADAPTER = K8S / "components" / "autoscaling" / "prometheus-adapter-values.yaml"
# The instruments exist from the start, their samples from the first number on: the ones here are never reset.
_PAGE = """
import json
from types import SimpleNamespace
from prometheus_client import REGISTRY
from services.common.rpc.gauges import EngineStats, export_engine
from services.common.rpc.telemetry import configure_telemetry
from services.coordinator.instruments import Instruments
configure_telemetry("probe", "probe-0", "127.0.0.1:0")
Instruments()
stats = SimpleNamespace(**{name: 1 for name in vars(EngineStats) if not name.startswith("_")})
export_engine(lambda: stats)
print(json.dumps([[s.name, s.labels] for family in REGISTRY.collect() for s in family.samples]))
"""


class Series(NamedTuple):
    """A series that a query reads: its name, and the labels that it has to have."""

    name: str
    labels: dict[str, str]


def shown() -> list[Series]:
    """Return what the pages of a coordinator and of a worker show, from the code itself."""
    done = subprocess.run([sys.executable, "-c", _PAGE], capture_output=True, text=True, check=True)
    return [Series(name, labels) for name, labels in json.loads(done.stdout)]


def read(query: str) -> list[Series]:
    """Return the series that a PromQL query reads.

    Raises:
        ValueError: It is none.
    """
    return [
        Series(str(node.name), {m.name: m.value for m in node.matchers.matchers})
        for node in _nodes(promql.parse(query))
        if isinstance(node, promql.VectorSelector)
    ]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None:
                yield from _nodes(each)


def adapter_rules() -> dict[str, str]:
    """Return prometheus-adapter's queries by the metric that each makes, filled in as it does for one pod."""
    rules = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    filled = {"LabelMatchers": 'namespace="paceline",pod=~"a|b"', "GroupBy": "pod"}
    return {
        rule["name"]["as"]: re.sub(r"<<\.(\w+)>>", lambda match: filled[match[1]], rule["metricsQuery"])
        for rule in rules
    }


def hpa_signals(document: Document) -> dict[str, float]:
    """Return what a HorizontalPodAutoscaler goes by: metric name and how much of it a pod should have."""
    signals = {}
    for metric in document["spec"]["metrics"]:
        if metric["type"] == "Pods":
            average = metric["pods"]["target"]["averageValue"]
            number = float(average.removesuffix("m")) / (1000 if average.endswith("m") else 1)
            signals[metric["pods"]["metric"]["name"]] = number
        else:
            signals[metric["containerResource"]["name"]] = metric["containerResource"]["target"]["averageUtilization"]
    return signals


def keda_signals(document: Document) -> dict[str, float]:
    """Return what a ScaledObject goes by: query, or name of a resource, and how much of it a pod should have."""
    return {
        trigger["metadata"].get("query", trigger["type"]): float(
            trigger["metadata"].get("threshold", trigger["metadata"].get("value"))
        )
        for trigger in document["spec"]["triggers"]
    }
