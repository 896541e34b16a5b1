"""What autoscaling goes by: the metrics that its objects name, and those that the code's pages show."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

from deploy import dashboard
from deploy.check import K8S

Document = dict[str, Any]
ADAPTER = K8S / "components" / "autoscaling" / "prometheus-adapter-values.yaml"
# The instruments exist from the start, most samples too; the others from the first number on.
_PAGE = """
import json
from types import SimpleNamespace
from prometheus_client import REGISTRY
import services.common.rpc.guards
from services.common.rpc.gauges import EngineStats, export_engine
from services.common.rpc.telemetry import configure_telemetry
from services.common.specdec.types import Decision, Origin
from services.coordinator.instruments import Estimate, Instruments
from services.coordinator.types import Call, Round
configure_telemetry("probe", "probe-0", "127.0.0.1:0")
instruments = Instruments()
instruments.watch_limit(1)
instruments.watch_workers(lambda: {"draft": True, "target": True})
instruments.watch_estimates(lambda: [Estimate({"greedy": True}, 0.5, {"alone": 1, "asked": 1, "draft": 1})])
decision = Decision((1, 2), 1, 2, Origin.RESIDUAL)
instruments.count_round(Round(1, 2, 2, decision, (1, 2), None, "", Call(), Call(), 0.0, 1.0, 0.0))
with instruments.requests.request() as clock:
    clock.planned(is_chat=True, prompt_tokens=1, model="probe")
    clock.emitted(1)
    clock.emitted(1)
stats = SimpleNamespace(**{name: 1 for name in vars(EngineStats) if not name.startswith("_")})
export_engine(lambda: stats)
print(json.dumps([[s.name, s.labels] for family in REGISTRY.collect() for s in family.samples]))
"""


# By the PodMonitor, for every sample of a pod.
ADDED = {"namespace", "pod", "app_kubernetes_io_component"}


class Series(NamedTuple):
    """A series that a query reads: its name, and the labels that it has to have."""

    name: str
    labels: dict[str, str]


def shown() -> list[Series]:
    """Return what the pages of a coordinator and of a worker show, from the code itself."""
    done = subprocess.run([sys.executable, "-c", _PAGE], capture_output=True, text=True, check=True)
    return [Series(name, labels) for name, labels in json.loads(done.stdout)]


def read(query: str) -> list[Series]:
    """Return the series that a PromQL query reads; a choice of values is a series for each.

    Raises:
        ValueError: It is none.
    """
    selectors = [node for node in _nodes(promql.parse(query)) if isinstance(node, promql.VectorSelector)]
    return [
        Series(str(node.name), dict(labels))
        for node in selectors
        for labels in itertools.product(*map(_choices, node.matchers.matchers))
    ]


def unknown(query: str, pages: Iterable[Series]) -> list[str]:
    """Return what a query reads that no page shows."""
    found = []
    for series in read(query):
        labels = {name: value for name, value in series.labels.items() if name not in ADDED}
        if not any(page.name == series.name and labels.items() <= page.labels.items() for page in pages):
            found.append(f"{series.name}{labels}")
    return found


def _choices(matcher: Any) -> list[tuple[str, str]]:
    values = matcher.value.split("|") if matcher.op == promql.MatchOp.Re else [matcher.value]
    return [(matcher.name, value) for value in values]


def dashboard_queries(namespace: str = ".*", interval: str = "5m") -> list[str]:
    """Return the dashboard's queries, filled in as Grafana does."""
    panels = json.loads(dashboard.PATH.read_text())["panels"]
    filled = {"namespace": namespace, "__rate_interval": interval}
    exprs = {target["expr"]: None for panel in panels for target in panel.get("targets", ())}
    return [re.sub(r"\$(\w+)", lambda match: filled[match[1]], expr) for expr in exprs]


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
