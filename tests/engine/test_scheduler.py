"""Who takes part in a pass, and with how much."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from services.common.engine.scheduler import PassLimits, plan_pass


@dataclass(eq=False)
class Request:
    pending: int
    rows: int = 1


def planned(limits: PassLimits, *waiting: Request) -> list[tuple[int, int, bool]]:
    """Return (which request, how many positions, complete) of each share."""
    return [(waiting.index(share.work), share.count, share.complete) for share in plan_pass(waiting, limits)]


def test_everybody_that_fits_takes_part_in_order() -> None:
    waiting = [Request(1), Request(5, 5), Request(1), Request(30)]
    assert planned(PassLimits(32, 64), *waiting) == [(0, 1, True), (1, 5, True), (2, 1, True), (3, 30, True)]
    assert planned(PassLimits()) == []


def test_a_long_prompt_costs_the_others_one_chunk_a_pass() -> None:
    prompt, *running = [Request(4000), Request(6, 6), Request(1)]
    limits, counts = PassLimits(256, 1024), []
    while prompt.pending:
        shares = plan_pass([prompt, *running], limits)
        assert [share.work for share in shares] == [prompt, *running]
        assert all(share.complete for share in shares[1:])
        assert sum(share.count for share in shares) <= 256 + 7 + prompt.rows
        counts.append(shares[0].count)
        prompt.pending -= shares[0].count
    assert counts == [256] * 15 + [160]
    assert shares[0].complete


def test_the_chunk_is_shared_by_all_prompts() -> None:
    waiting = [Request(100), Request(100), Request(100), Request(1)]
    # 99 positions of each whose logits nobody asked for; the third waits, the last one does not.
    assert planned(PassLimits(150, 1000), *waiting) == [(0, 100, True), (1, 51, False), (3, 1, True)]
    assert planned(PassLimits(99, 1000), *waiting) == [(0, 100, True), (3, 1, True)]
    assert planned(PassLimits(10, 1000), *waiting) == [(0, 10, False), (3, 1, True)]


def test_what_a_running_session_catches_up_with_does_not_wait_for_prompts() -> None:
    # As a draft's request after a round that kept all: two tokens, the law after the last one.
    assert planned(PassLimits(256, 1024), Request(4000), Request(2), Request(17), Request(18)) == [
        (0, 256, False),
        (1, 2, True),
        (2, 17, True),
    ]
    assert planned(PassLimits(1, 1024), Request(4000), Request(2)) == [(0, 1, False), (1, 2, True)]


def test_positions_whose_logits_are_wanted_are_no_prefill() -> None:
    waiting = [Request(20, 20), Request(20, 20)]
    assert planned(PassLimits(1, 1000), *waiting) == [(0, 20, True), (1, 20, True)]


def test_a_pass_has_a_greatest_size() -> None:
    waiting = [Request(6, 6), Request(6, 6), Request(4, 4), Request(1)]
    # The second does not fit; those after it need not wait for it.
    assert planned(PassLimits(100, 10), *waiting) == [(0, 6, True), (2, 4, True)]
    assert planned(PassLimits(100, 3), Request(50), Request(1)) == [(0, 50, True)], "whole: its prefill is one chunk"
    assert planned(PassLimits(30, 3), Request(50), Request(1)) == [(0, 3, False)]


def test_the_first_one_always_gets_in() -> None:
    for pending, rows in ((1, 1), (5000, 1), (5000, 5000), (257, 1), (2000, 1900)):
        (share, *_) = plan_pass([Request(pending, rows), Request(1)], PassLimits(256, 1024))
        assert share.count > 0
        assert share.work.pending == pending


@pytest.mark.parametrize("seed", range(3))
def test_nobody_starves(seed: int) -> None:
    source = random.Random(seed)
    limits = PassLimits(16, 24)
    waiting: list[Request] = []
    ahead: dict[Request, int] = {}
    for passes in range(2000):
        while len(waiting) < 12:
            rows = source.randrange(1, 9)
            request = Request(rows + source.choice([0, 0, 0, source.randrange(100)]), rows)
            # A request waits at most for what those before it have to feed, and each pass feeds some of the first.
            ahead[request] = passes + sum(other.pending for other in [*waiting, request])
            waiting.append(request)
        shares = plan_pass(waiting, limits)
        order = [waiting.index(share.work) for share in shares]
        assert order == sorted(order)
        assert order[0] == 0
        before = [share.count - share.work.rows * share.complete for share in shares]
        assert sum(count for count in before if count > 1) <= limits.prefill_chunk
        assert sum(share.count for share in shares) <= limits.positions or len(shares) == 1
        for share in shares:
            assert share.complete == (share.count == share.work.pending)
            share.work.pending -= share.count
            if share.complete:
                waiting.remove(share.work)
                assert passes <= ahead.pop(share.work)
