"""A draft that is fed with the target's hidden states, in real processes: exact, and back in use after every loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.support.cluster import Reply
from tests.support.drafts import make_tiny_draft
from tests.support.processes import GREEDY, Coordinator, Processes, Service
from tests.tracing.conftest import free_address
from tests.tracing.test_metrics_page import page

TARGET = ("--dtype", "float32", "--kv-cache-memory", "64MiB")
LENGTH = 240
REQUEST = {
    "text": "the paceline goes round and round, and the draft breaks the wind",
    "max_tokens": LENGTH,
    "gamma": 4,
    "sampling": GREEDY,
    "stop": pb.StopConditions(ignore_eos=True),
}


class Fed:
    """A target, a draft that is fed by it, and their coordinator."""

    def __init__(self, models: Path, folder: Path, processes: Processes, *target: str) -> None:
        draft = make_tiny_draft(folder / "fed", models / "target", layers=(0, 1), head=range(320), noise=0.0)
        self.target: Service = processes.target("--model", str(models / "target"), *TARGET, *target)
        self.metrics = free_address()
        fed = ("--drafter", "model", "--model", str(draft), "--metrics-listen", self.metrics)
        self.draft: Service = processes.draft(*fed, *TARGET)
        self.coordinator: Coordinator = processes.coordinator(
            # A target starts in seconds, on a machine that is busy in half a minute.
            *(self.target, self.draft, "--overlap", "off", "--target-retry-s", "200"),
            wait_for_draft=False,
        )

    def disturbed(self, disturb: Callable[[], None]) -> Reply:
        """Generate, and do something once a fifth of the answer has come."""
        chunks: list[pb.TextChunk] = []
        result, seen = None, 0
        with self.coordinator.connected() as stub:
            for item in stub.Generate(pb.GenerateRequest(**REQUEST), timeout=300):
                if item.HasField("result"):
                    result = item.result
                    continue
                chunks.append(item.chunk)
                before, seen = seen, seen + len(item.chunk.tokens)
                if before < LENGTH // 5 <= seen:
                    disturb()
        assert result is not None
        return Reply(tuple(chunks), result)


def proposed(reply: Reply) -> list[int]:
    return [done.proposed for done in reply.result.speculation.per_round]


@pytest.mark.timeout(600)
def test_the_text_is_the_targets_whatever_is_lost(models: Path, tmp_path: Path, processes: Processes) -> None:
    fed = Fed(models, tmp_path, processes)
    fed.coordinator.wait_for_draft()
    alone = fed.coordinator.generate(**REQUEST | {"gamma": 0})
    together = fed.coordinator.generate(**REQUEST)
    assert together.tokens == alone.tokens
    # Nothing is known of the prompt before the target has seen it.
    assert proposed(together)[0] == 0
    assert all(proposed(together)[1:-1])
    assert together.result.speculation.accepted > 0
    assert together.result.speculation.degraded_rounds == 0
    assert page(fed.metrics)["paceline_worker_sessions_outgrown_total"] == 0

    seeded = REQUEST | {"seed": 7, "sampling": worker_pb2.SamplingParams(temperature=1.0)}
    coupled = [fed.coordinator.generate(**seeded | {"gamma": gamma}) for gamma in (0, 4)]
    assert coupled[0].tokens == coupled[1].tokens
    assert coupled[1].result.speculation.proposed > 0

    def restart() -> None:
        fed.target.kill()
        fed.target.restart()

    reply = fed.disturbed(restart)
    assert "target lost" in fed.coordinator.log
    assert reply.tokens == alone.tokens
    # The fresh target tells the states that the draft lacks.
    assert all(proposed(reply)[1:-1])

    reply = fed.disturbed(fed.draft.kill)
    assert "draft lost" in fed.coordinator.log
    assert reply.tokens == alone.tokens
    fed.draft.restart()
    fed.draft.wait_until_serving()
    fed.coordinator.wait_for_draft()
    assert all(proposed(fed.coordinator.generate(**REQUEST))[1:-1])


@pytest.mark.slow
def test_a_target_that_keeps_other_states_is_not_drafted_for(
    models: Path, tmp_path: Path, processes: Processes
) -> None:
    fed = Fed(models, tmp_path, processes, "--features", "none")
    reply = fed.coordinator.generate(**REQUEST)
    assert len(reply.tokens) == LENGTH
    assert sum(proposed(reply)) == 0
    assert "is not used: it is fed with layers [1, 2]" in fed.coordinator.log
