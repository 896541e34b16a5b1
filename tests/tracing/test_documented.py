"""docs/operations.md names every metric that the services export, with its unit and attributes, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from tests.tracing.conftest import Traced

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `([a-z_.]+)(?:\{([a-z_., ]+)\})?` \| (\S+) \|", re.MULTILINE)
# Only where it happens: see the tests of the coordinator.
_RARE = {"paceline.draft.mismatch"}
_RARE_LABELS = {"error.type"}


class Described(NamedTuple):
    """A metric: its unit, and the names of its attributes."""

    unit: str
    labels: frozenset[str]


def documented() -> dict[str, Described]:
    rows = _ROW.findall(DOCS.read_text())
    found = {name: Described(unit, frozenset(filter(None, labels.split(", ")))) for name, labels, unit in rows}
    assert len(found) == len(rows), "a metric is there twice"
    return found


def described(metric: Metric) -> Described:
    points = getattr(metric, str(metric.WhichOneof("data"))).data_points
    return Described(metric.unit, frozenset(pair.key for point in points for pair in point.attributes))


def test_every_metric_is_in_the_table(traced: Traced) -> None:
    # One whose gamma adapts and that takes a few rounds: every kind of number has been noted then.
    traced.coordinator.generate(text="abcabc", max_tokens=30, stop={"ignore_eos": True})
    traced.receiver.metric("paceline-coordinator", "paceline.speculation.alpha")
    exported = {name: described(metric) for metric in traced.receiver.metrics() for name in [metric.name]}
    table = documented()
    told = {name: entry._replace(labels=entry.labels - _RARE_LABELS) for name, entry in table.items()}
    assert exported == {name: entry for name, entry in told.items() if name not in _RARE}
    assert table.keys() >= _RARE
