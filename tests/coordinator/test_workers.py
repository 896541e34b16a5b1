"""Finding the target: its model and its tokenizer are asked for one after the other, perhaps of two pods."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from paceline.v1 import target_pb2, worker_pb2
from services.coordinator import workers as workers_module
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from services.coordinator.instruments import Instruments
from services.coordinator.workers import Workers
from tests.support.laws import close_law
from tests.support.scripted import ScriptedTarget


class Counting(ScriptedTarget):
    """Counts how often it is asked for its tokenizer."""

    asked = 0

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
        self.asked += 1
        return await super().GetTokenizer(request, context)


class InARollOut(Counting):
    """Answers the first question for a tokenizer as a pod with another model would."""

    async def GetTokenizer(self, request: Any, context: Any) -> target_pb2.GetTokenizerResponse:
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


async def test_of_two_models_that_answer_in_turn_each_tokenizer_is_built_once() -> None:
    target = Counting(close_law(distance=0.5, seed=2))
    await target.start()
    settings = CoordinatorSettings(listen="127.0.0.1:0", target=target.address, draft="", shutdown_grace_s=0)
    workers = Workers(settings, Instruments())
    found = []
    for n in range(6):
        target.info.identity.weights_hash = f"model {n % 2}"
        await workers._find_target()
        assert workers.target is not None
        found.append(workers.target)
    await workers.close()
    await target.stop()
    assert [one.info.identity.weights_hash for one in found] == ["model 0", "model 1"] * 3
    assert target.asked == 2
    assert len({id(one.codec) for one in found}) == 2


async def test_a_target_that_keeps_other_states_now_is_noticed() -> None:
    """The same model, restarted with another --features."""
    target = Counting(close_law(distance=0.5, seed=2))
    await target.start()
    settings = CoordinatorSettings(listen="127.0.0.1:0", target=target.address, draft="", shutdown_grace_s=0)
    workers = Workers(settings, Instruments())
    draft = worker_pb2.ModelInfo(features=worker_pb2.FeatureSpec(layers=[1, 2], width=8, window=16))
    fits = []
    for spec in (worker_pb2.FeatureSpec(), worker_pb2.FeatureSpec(layers=[1, 2], width=8), worker_pb2.FeatureSpec()):
        target.info.features.CopyFrom(spec)
        await workers._find_target()
        fits.append(workers._fits(draft))
    await workers.close()
    await target.stop()
    assert fits == [False, True, False]
    assert target.asked == 1


async def test_a_worker_that_gives_no_answer_is_told_of_once_and_not_at_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, workers_module.__name__)
    # Nothing listens there.
    settings = CoordinatorSettings(listen="127.0.0.1:0", target="127.0.0.1:1", draft="")
    workers = Workers(settings, Instruments())

    async def ask() -> int:
        with workers._reported("target"):
            await workers._ask_target.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=10)
        return sum("no answer of a target worker: UNAVAILABLE" in line for line in caplog.messages)

    assert [await ask() for _ in range(3)] == [0, 0, 0]
    monkeypatch.setattr(workers_module, "_LOADING_S", 0.0)
    assert [await ask() for _ in range(3)] == [1, 1, 1]
    await workers.close()
