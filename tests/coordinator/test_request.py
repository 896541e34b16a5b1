"""What only a tokenizer and a model that do not quite fit show."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import target_pb2, worker_pb2
from services.common.rpc.codec import encode_row
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import MAX_GAMMA, Row, SamplingParams
from services.coordinator.config import CoordinatorSettings
from services.coordinator.request import Target, feature_room, plan, whole_rows
from services.coordinator.text import TextCodec
from tests.support.tokenizers import CHAT_TEMPLATE, letter_tokenizer


@pytest.mark.parametrize(
    "prompt", [{"text": "abc"}, {"chat": {"messages": [{"role": pb.ROLE_USER, "content": "abc"}]}}], ids=str
)
def test_a_token_that_only_the_tokenizer_knows(prompt: dict[str, object]) -> None:
    codec = TextCodec(letter_tokenizer(3).to_str().encode(), CHAT_TEMPLATE, {})
    target = Target(worker_pb2.ModelInfo(vocab_size=2, context_length=10), codec, SamplingParams())
    with pytest.raises(InvalidFieldError) as refused:
        plan(pb.GenerateRequest(**prompt), "id", target, CoordinatorSettings())  # type: ignore[arg-type]
    (field,) = prompt
    assert str(refused.value) == f"{field} is 'a prompt with token 2': must be of tokens 0 to 1, those of the model"


def test_no_more_drafts_than_a_message_holds_rows() -> None:
    # 65 dense rows of this vocabulary are 65 MiB.
    codec = TextCodec(letter_tokenizer(3).to_str().encode(), CHAT_TEMPLATE, {})
    target = Target(worker_pb2.ModelInfo(vocab_size=2**18, context_length=100), codec, SamplingParams())
    settings = CoordinatorSettings(max_gamma=64, partial_rows=False)

    def planned(**fields: int) -> int:
        return plan(pb.GenerateRequest(text="abc", **fields), "id", target, settings).gamma  # type: ignore[arg-type]

    assert planned(gamma=62) == 62
    with pytest.raises(InvalidFieldError) as refused:
        planned(gamma=63)
    told = "gamma is 63: must be at most 62, what 64 MiB (--max-message-mib) hold of rows of 262144 ids"
    assert str(refused.value) == told
    # What the request does not say is lowered, not refused.
    settings = CoordinatorSettings(max_message_mib=4, partial_rows=False)
    assert planned() == 2
    # Rows in part leave room.
    settings = CoordinatorSettings(max_message_mib=4, max_gamma=64)
    assert planned(gamma=64) == 64


@pytest.mark.parametrize("message_mib", [4, 40])
@pytest.mark.parametrize("vocab_size", [1_000, 49_152, 152_064, 262_144])
def test_a_message_holds_the_rows_and_the_hidden_states_that_share_it(message_mib: int, vocab_size: int) -> None:
    info = worker_pb2.ModelInfo(vocab_size=vocab_size)
    sizes = []
    for width in (0, 2_304):
        info.features.width = width
        count, room = min(MAX_GAMMA + 1, whole_rows(info, message_mib)), feature_room(message_mib)
        row = encode_row(Row(np.full(vocab_size, 1 / vocab_size, np.float32)))
        reply = target_pb2.VerifyResponse(round=2**32 - 1, rows=[row] * count)
        if width:
            reply.features.start, reply.features.data = 2**32 - 1, bytes(room)
        assert reply.ByteSize() <= message_mib * 2**20
        sizes.append(whole_rows(info, message_mib))
    without, with_states = sizes
    assert without > with_states > 0
    assert 4 * vocab_size * (with_states + 1) > 0.73 * message_mib * 2**20, "the room is used"
