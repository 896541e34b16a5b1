from __future__ import annotations

import pytest

from bench.phases import PHASES, phases
from paceline.v1.worker_pb2 import WorkerTiming
from tests.bench.fakes import one_round


def test_the_phases_of_a_round_add_up_to_the_next_ones_start() -> None:
    first, last = phases([one_round(5), one_round(65.5)])
    assert [first[name] for name in PHASES] == [10, 2, 40, 5, 2, 1, 0.5]
    assert sum(first.values()) == pytest.approx(60.5)
    assert last["between"] == 0


def test_drafting_that_ran_ahead_is_not_counted_twice() -> None:
    # Its passes took 10 ms, but the round has waited for half a millisecond only.
    ahead = one_round(draft_ms=0.5)
    ahead.draft.CopyFrom(WorkerTiming(forward_ms=10, service_ms=11))
    (found,) = phases([ahead])
    assert (found["draft pass"], found["propose"]) == (0.5, 0)
    assert all(value >= 0 for value in found.values())
