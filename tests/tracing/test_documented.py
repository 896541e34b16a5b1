"""docs/operations.md names every metric that the services export, with its unit and attributes, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from tests.tracing.conftest import Traced

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `([a-z_.]+)(?:\{([a-z_., ]+)\})?` \| (\S+) \|", re.MULTILINE)
# Only where it happens, or of another kind of draft: see the tests of the coordinator, and `test_fed_draft`.
_RARE = {"paceline.draft.mismatch", "paceline.worker.sessions.outgrown"}
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


def usual(metrics: dict[str, Described]) -> dict[str, Described]:
    """Return what is exported whatever happens."""
    return {
        name: entry._replace(labels=entry.labels - _RARE_LABELS) for name, entry in metrics.items() if name not in _RARE
    }


def test_every_metric_is_in_the_table(traced: Traced) -> None:
    # One whose gamma adapts and that takes a few rounds: every kind of number has been noted then.
    traced.coordinator.generate(text="abcabc", max_tokens=30, stop={"ignore_eos": True})
    traced.receiver.metric("paceline-coordinator", "paceline.speculation.alpha")
    exported = {name: described(metric) for metric in traced.receiver.metrics() for name in [metric.name]}
    table = documented()
    assert usual(exported) == usual(table)
    assert table.keys() >= _RARE
