"""Under COUPLED a seed has the same tokens: real processes, random little models in float32, drafts of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.common.engine.processors import distributions
from services.common.specdec.coupled import winner_among
from services.common.specdec.types import SamplingParams
from tests.faults.conftest import OFFLINE
from tests.faults.test_processes import disturbed
from tests.support.cluster import Reply
from tests.support.engines import Library
from tests.support.models import VOCAB
from tests.support.processes import Coordinator, Processes, Service

SEED = 11
PARAMS = SamplingParams(temperature=0.8, top_p=0.95)
REQUEST: dict[str, Any] = {
    "text": "Once upon a time",
    "max_tokens": 300,
    "seed": SEED,
    "sampling": worker_pb2.SamplingParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0),
    "stop": pb.StopConditions(ignore_eos=True),
}
FLOAT32 = ("--dtype", "float32")
# Scores that float32's rounding may have put in the other order.
FLOAT_NOISE = 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("logs"), OFFLINE) as processes:
        yield processes


@pytest.fixture(scope="module")
def target(run: Processes, models: Path) -> Service:
    return run.target("--model", str(models / "target"), *FLOAT32)


@pytest.fixture(scope="module")
def draft(run: Processes, models: Path) -> Service:
    return run.draft("--drafter", "model", "--model", str(models / "draft"), *FLOAT32)


@pytest.fixture(scope="module")
def drafted(run: Processes, target: Service, draft: Service) -> Coordinator:
    """A coordinator of both."""
    return run.coordinator(target, draft, "--target-retry-s", "120")


@pytest.fixture(scope="module")
def alone(run: Processes, target: Service) -> Reply:
    """What the target gives by itself."""
    coordinator = run.coordinator(target, None)
    reply = coordinator.generate(**REQUEST, gamma=0)
    coordinator.close()
    assert reply.result.verification == worker_pb2.VERIFICATION_COUPLED
    return reply


def check_same(reply: Reply, alone: Reply, models: Path) -> None:
    """The same tokens; or, where they part, two scores that are within float noise of each other."""
    at = next((i for i, pair in enumerate(zip(reply.tokens, alone.tokens, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return
    text = [*alone.result.prompt_token_ids, *alone.tokens[:at]]
    (row,) = distributions(Library(models / "target").logits(text, 1), PARAMS)
    full = row.dense(VOCAB)
    first, second = (
        winner_among(ids, full[ids], SEED, len(text)).score
        for ids in (np.array([token], np.uint32) for token in (reply.tokens[at], alone.tokens[at]))
    )
    assert abs(first / second - 1) < FLOAT_NOISE, f"token {at} of the answer"


def test_the_tokens_are_those_of_the_target_alone(drafted: Coordinator, alone: Reply, models: Path) -> None:
    for gamma in (1, 4, 8, None):
        reply = drafted.generate(**REQUEST, gamma=gamma)
        check_same(reply, alone, models)
        # Left to the coordinator, gamma may be 0.
        assert reply.result.speculation.accepted > 0 or gamma is None


@pytest.mark.parametrize("name", ["other", "ngram"])
def test_they_are_with_a_draft_that_is_seldom_right(
    run: Processes, target: Service, alone: Reply, models: Path, name: str
) -> None:
    model = ("--drafter", "model", "--model", str(models / name), *FLOAT32)
    worker = run.draft(*(() if name == "ngram" else model))
    coordinator = run.coordinator(target, worker)
    for gamma in (1, 4, 8, None):
        check_same(coordinator.generate(**REQUEST, gamma=gamma), alone, models)
    coordinator.close()
    worker.close()


def test_they_are_when_the_target_is_killed_and_restarted(
    drafted: Coordinator, target: Service, alone: Reply, models: Path
) -> None:
    def restart() -> None:
        target.kill()
        target.restart()

    drafted.wait_for_draft()
    check_same(disturbed(drafted, restart, **REQUEST, gamma=3), alone, models)
    assert "target lost" in drafted.log


def test_they_are_when_the_draft_is_killed(drafted: Coordinator, draft: Service, alone: Reply, models: Path) -> None:
    drafted.wait_for_draft()
    check_same(disturbed(drafted, draft.kill, **REQUEST, gamma=3), alone, models)
    assert "draft lost" in drafted.log
    # Whichever test comes next finds it again.
    draft.restart()
