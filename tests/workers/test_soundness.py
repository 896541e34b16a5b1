"""A draft whose logits are not finite is told of when that begins and when it ends."""

from __future__ import annotations

import logging

import pytest

from services.draft_worker.soundness import Soundness

ROWS = 1_000


@pytest.fixture(autouse=True)
def every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_it_is_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    soundness = Soundness()
    soundness.judge(False, 7)
    assert caplog.messages == []
    for length in (9, 10, 11):
        soundness.judge(True, length)
    assert caplog.messages == ["the draft's logits are not finite after 9 tokens: nothing is drafted there"]
    for _ in range(ROWS):
        soundness.judge(False, 12)
    assert caplog.messages[1:] == ["the draft's logits are finite again, 3 rows were not"]
    soundness.judge(True, 13)
    assert caplog.messages[2:] == ["the draft's logits are not finite after 13 tokens: nothing is drafted there"]


def test_one_session_with_bad_rows_among_good_ones_is_one_state(caplog: pytest.LogCaptureFixture) -> None:
    soundness = Soundness()
    for index in range(20 * ROWS):
        soundness.judge(index % (ROWS - 1) == 0, 5)
    assert len(caplog.messages) == 1
