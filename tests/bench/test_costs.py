from __future__ import annotations

import pytest

from bench.costs import round_costs
from paceline.v1.coordinator_pb2 import RoundStats
from paceline.v1.worker_pb2 import WorkerTiming


def test_own_cost_is_the_round_less_both_forward_passes_and_the_sum_of_its_parts() -> None:
    rounds = [
        RoundStats(
            start_ms=start_ms,
            total_ms=60,
            proposed=3,
            draft_ms=12,
            verify_ms=45,
            accept_ms=2,
            draft=WorkerTiming(forward_ms=10, service_ms=11),
            target=WorkerTiming(queue_ms=0.5, forward_ms=40, service_ms=42),
        )
        for start_ms in (5, 65.5)
    ]
    first, last = round_costs(rounds)
    assert (first.drafts, first.total, first.forward, first.own) == (3, 60, 50, 10)
    assert (first.draft, first.wire, first.worker, first.accept, first.rest) == (2, 3, 2, 2, 1)
    assert first.draft + first.wire + first.worker + first.accept + first.rest == pytest.approx(first.own)
    assert (first.between, last.between) == (0.5, 0)
