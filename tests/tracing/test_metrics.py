"""Metrics arrive too: their names, units and buckets, and numbers that agree with what the client was told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from paceline.v1 import coordinator_pb2 as pb
from tests.tracing.conftest import Traced

# The standard variable names the process.
NAME = "a-coordinator-of-its-own"


@pytest.fixture(scope="module")
def stats(traced: Traced) -> Iterator[pb.SpeculationStats]:
    """The only request of a coordinator."""
    coordinator = traced.processes.coordinator(
        traced.target, traced.draft, env={"OTEL_SERVICE_NAME": NAME}, wait_for_draft=False
    )
    reply = coordinator.generate(text="abcabc", gamma=3, max_tokens=20, stop={"ignore_eos": True})
    yield reply.result.speculation
    assert coordinator.stop() == 0


def test_tokens_are_counted(traced: Traced, stats: pb.SpeculationStats) -> None:
    for name, count in (("proposed", stats.proposed), ("accepted", stats.accepted), ("emitted", stats.emitted)):
        metric = traced.receiver.metric(NAME, f"paceline.tokens.{name}", lambda metric, n=count: total(metric) == n)
        assert metric.sum.is_monotonic
        assert metric.unit == "{token}"


def test_rounds_are_timed_in_seconds(traced: Traced, stats: pb.SpeculationStats) -> None:
    def counts(metric: Metric) -> dict[str, int]:
        return {point.attributes[0].value.string_value: point.count for point in metric.histogram.data_points}

    expected = dict.fromkeys(("draft", "verify", "accept", "wire", "total"), stats.rounds)
    metric = traced.receiver.metric(NAME, "paceline.round.duration", lambda metric: counts(metric) == expected)
    assert metric.unit == "s"
    bounds = metric.histogram.data_points[0].explicit_bounds
    assert bounds[0] <= 0.001
    assert 5 <= bounds[-1] <= 60
    total_s = next(
        point.sum for point in metric.histogram.data_points if point.attributes[0].value.string_value == "total"
    )
    assert total_s == pytest.approx(sum(done.total_ms for done in stats.per_round) / 1e3)


def test_accepted_lengths_have_a_bucket_each(traced: Traced, stats: pb.SpeculationStats) -> None:
    def point(metric: Metric) -> dict[float, int]:
        (only,) = metric.histogram.data_points
        return {bound: n for bound, n in zip(only.explicit_bounds, only.bucket_counts, strict=False) if n}

    lengths = [done.accepted for done in stats.per_round]
    expected = {float(length): lengths.count(length) for length in lengths}
    traced.receiver.metric(NAME, "paceline.round.accepted_length", lambda metric: point(metric) == expected)


def test_running_requests_are_gauged(traced: Traced, stats: pb.SpeculationStats) -> None:
    metric = traced.receiver.metric(NAME, "paceline.requests.running", lambda metric: total(metric) == 0)
    assert not metric.sum.is_monotonic


def test_what_adaptive_gamma_goes_by_is_gauged(traced: Traced) -> None:
    name = "a-coordinator-that-adapts"
    coordinator = traced.processes.coordinator(traced.target, traced.draft, env={"OTEL_SERVICE_NAME": name})
    result = coordinator.generate(text="abcabc", max_tokens=30, stop={"ignore_eos": True}).result
    assert result.adaptive_gamma

    def agrees(metric: Metric) -> bool:
        # The rounds of one answer, of which little has been forgotten yet.
        (only,) = metric.gauge.data_points
        return bool(only.as_double == pytest.approx(result.speculation.alpha, abs=0.03))

    (alpha,) = traced.receiver.metric(name, "paceline.speculation.alpha", agrees).gauge.data_points
    assert {a.key: a.value.string_value or a.value.bool_value for a in alpha.attributes if a.key != "max_gamma"} == {
        "greedy": True,
        "verification": "token",
    }
    costs = traced.receiver.metric(name, "paceline.speculation.cost", lambda m: len(m.gauge.data_points) == 3)
    parts = {next(a.value.string_value for a in p.attributes if a.key == "part") for p in costs.gauge.data_points}
    assert parts == {"alone", "asked", "draft"}
    assert all(0 <= point.as_double < 1 for point in costs.gauge.data_points)
    assert coordinator.stop() == 0


@pytest.mark.parametrize("worker", ["target", "draft"])
def test_a_worker_tells_what_its_engine_does(traced: Traced, stats: pb.SpeculationStats, worker: str) -> None:
    name = f"paceline-{worker}-worker"

    def states(metric: Metric) -> dict[str, int]:
        return {point.attributes[0].value.string_value: point.as_int for point in metric.gauge.data_points}

    # All sessions have ended with their requests.
    traced.receiver.metric(name, "paceline.worker.sessions", lambda m: states(m) == {"open": 0, "waiting": 0})
    tokens = states(traced.receiver.metric(name, "paceline.worker.kv.tokens", lambda m: states(m)["reserved"] == 0))
    assert tokens["free"] > 0
    assert tokens.keys() == {"reserved", "kept", "free"}
    (queue,) = traced.receiver.metric(name, "paceline.worker.queue").gauge.data_points
    assert queue.as_int == 0
    fed = sum(getattr(done, worker).forward_tokens for done in stats.per_round)
    traced.receiver.metric(name, "paceline.worker.pass.tokens", lambda m: total(m) >= fed)
    passes = traced.receiver.metric(name, "paceline.worker.passes", lambda m: total(m) > 0)
    shared = traced.receiver.metric(name, "paceline.worker.pass.sessions", lambda m: total(m) >= total(passes))
    (spent,) = traced.receiver.metric(name, "paceline.worker.pass.time").sum.data_points
    assert 0 < spent.as_double < 60
    limit = traced.receiver.metric(name, "paceline.worker.sessions.limit")
    assert [point.as_int for point in limit.gauge.data_points] == [64]
    assert passes.sum.is_monotonic
    assert shared.sum.is_monotonic
    for counter in ("hits", "tokens"):
        assert total(traced.receiver.metric(name, f"paceline.worker.prefix.{counter}")) >= 0


def total(metric: Metric) -> int:
    """Return the sum over all attributes."""
    return int(sum(point.as_int for point in metric.sum.data_points))
