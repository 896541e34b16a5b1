"""A device that fails for a moment, or for good."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.engine.engine import Engine
from services.common.engine.kv_pool import KvPool
from services.common.engine.options import EngineOptions
from services.common.specdec.types import SamplingParams
from services.draft_worker.model_proposer import ModelProposer
from services.draft_worker.proposer import ProposalRequest, SessionRequest
from services.target_worker.verifier import Verifier
from tests.support.engines import StartEngine, evaluate, load, random_tokens, runner_of
from tests.support.models import make_tiny_llama

TEXT = random_tokens(random.Random(1), 50)


def spoil_keys(patch: pytest.MonkeyPatch) -> None:
    update = KvPool.update

    def spoiled(
        self: KvPool, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return update(self, keys * torch.nan, values, layer)

    patch.setattr(KvPool, "update", spoiled)


async def test_a_prefix_with_nan_in_it_is_given_to_no_other_session(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(make_tiny_llama(tmp_path / "model"))
    verifier = Verifier(engine)
    session = await verifier.open(SamplingParams(), 50, 10)
    with monkeypatch.context() as patch:
        spoil_keys(patch)
        (row,) = (await session.verify(0, TEXT, 1)).rows
    assert np.isnan(row.total)
    assert engine.stats().bad_rows == 1
    # Nor does the session itself build on it.
    (row,) = (await session.verify(50, [7], 1)).rows
    assert row.total == pytest.approx(1, abs=1e-4)
    session.close()
    another = await verifier.open(SamplingParams(), 50, 10)
    (row,) = (await another.verify(0, TEXT, 1)).rows
    assert row.total == pytest.approx(1, abs=1e-4)


async def test_a_draft_does_not_build_on_it_either(
    tmp_path: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start_engine(make_tiny_llama(tmp_path / "model"))
    session = await ModelProposer(engine).open(SessionRequest(SamplingParams(), 0, 50, 10))
    with monkeypatch.context() as patch:
        spoil_keys(patch)
        assert [drafts async for drafts in session.propose(ProposalRequest(0, 0, TEXT, 3))] == []
    assert engine.stats().bad_rows == 1
    assert len([drafts async for drafts in session.propose(ProposalRequest(1, 50, [7], 3))]) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_device_that_fails_for_good_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    died = threading.Event()
    loaded = load(make_tiny_llama(tmp_path / "model"))
    engine = await asyncio.to_thread(Engine, loaded, EngineOptions(kv_cache_memory="64MiB"), died.set)
    session = await engine.open(60)
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(engine), "run", fails)
        for _ in range(4):
            with pytest.raises(RuntimeError, match="illegal"):
                await evaluate(session, 0, TEXT)
    # One that works again starts the count over.
    await evaluate(session, 0, TEXT)
    monkeypatch.setattr(runner_of(engine), "run", fails)
    for failures in range(5):
        assert not died.is_set(), failures
        with pytest.raises(RuntimeError, match="illegal"):
            await evaluate(session, 0, TEXT)
    async with asyncio.timeout(10):
        await asyncio.to_thread(died.wait)
    await engine.close()
