"""What planning costs while it holds the lock that the event loop needs: counted in comparisons, not in seconds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.common.engine import prefixes
from services.common.engine.kv_memory import KvMemory

PREFIX = [7] * 1000
SESSIONS = 64


def test_sessions_that_wait_for_one_prefix_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = KvMemory(2000 * SESSIONS)
    leases = []
    for number in range(SESSIONS):
        lease = memory.reserve(1100)
        assert lease is not None
        lease.sequence.rebase(0, [*PREFIX, number])
        memory.publish(lease)
        leases.append(lease)
    leases[0].sequence.cached = 500
    compared = 0
    common_length = prefixes.common_length

    def count(a: Sequence[int], b: Sequence[int]) -> int:
        nonlocal compared
        compared += 1
        return common_length(a, b)

    monkeypatch.setattr(prefixes, "common_length", count)
    for lease in leases[1:]:
        assert memory.donor(lease.tokens) == (leases[0], 500)
        assert memory.sharing(lease.tokens, {leases[0]}) == {leases[0]: 1000}
    assert compared == 2 * (SESSIONS - 1)
