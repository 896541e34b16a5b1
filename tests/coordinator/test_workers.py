"""Finding the target: its model and its tokenizer are asked for one after the other, perhaps of two pods."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.v1 import target_pb2
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from tests.support.laws import close_law
from tests.support.scripted import ScriptedTarget


class InARollOut(ScriptedTarget):
    """Answers the first question for a tokenizer as a pod with another model would."""

    asked = 0

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        self.asked += 1
        reply = await super().GetTokenizer(request, context)
        if self.asked == 1:
            reply.identity.weights_hash = "of-another-model"
        return reply


async def test_a_tokenizer_of_another_model_is_not_used() -> None:
    target = InARollOut(close_law(distance=0.5, seed=2))
    await target.start()
    coordinator = Coordinator(
        CoordinatorSettings(listen="127.0.0.1:0", target=target.address, draft="", shutdown_grace_s=0)
    )
    await coordinator.start()
    await asyncio.wait_for(coordinator.wait_until_ready(), 30)
    assert target.asked == 2
    await coordinator.stop()
    await target.stop()
