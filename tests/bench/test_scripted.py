"""Scripted workers: what they say is what workers say, and as many drafts are kept as is claimed."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scripted import Script
from paceline.v1 import draft_pb2, target_pb2
from services.common.rpc.codec import decode_row
from services.common.specdec.acceptance import accept, usable_drafts
from services.common.specdec.randomness import uniform
from services.common.specdec.types import Draft

VOCAB = 2048


@pytest.mark.parametrize("support", [0, 64])
def test_replies_are_messages_and_seven_drafts_of_ten_are_kept(support: int) -> None:
    script = Script(VOCAB, support)
    accepted = tested = 0
    for index in range(300):
        proposed = draft_pb2.ProposeResponse.FromString(script.proposal(index, 5))
        verified = target_pb2.VerifyResponse.FromString(script.verification(index, 6))
        assert (proposed.round, proposed.done, verified.round) == (index, True, index)
        drafts = [Draft(draft.token, decode_row(draft.q)) for draft in proposed.drafts]
        rows = [decode_row(row) for row in verified.rows]
        assert usable_drafts(drafts, VOCAB) == (5, "")
        assert {len(row.weights) for row in rows} == {support or VOCAB}
        decision = accept(rows, drafts, VOCAB, lambda offset, purpose, i=index: uniform(1, i, offset, purpose))
        accepted += decision.accepted
        tested += decision.tested
    assert accepted / tested == pytest.approx(0.7, abs=5 * np.sqrt(0.21 / tested) + 0.02)
