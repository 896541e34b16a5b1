"""What only a tokenizer and a model that do not quite fit show."""

from __future__ import annotations

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import SamplingParams
from services.coordinator.config import CoordinatorSettings
from services.coordinator.request import Target, plan
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
