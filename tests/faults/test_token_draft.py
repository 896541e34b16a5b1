"""A trained draft that sees tokens alone, in real processes: exact, and in use from the first round on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.support.drafts import make_tiny_draft
from tests.support.processes import GREEDY, Processes

WORKER = ("--dtype", "float32", "--kv-cache-memory", "64MiB")
GAMMA = 4
REQUEST = {
    "text": "the paceline goes round and round, and the draft breaks the wind",
    "max_tokens": 80,
    "gamma": GAMMA,
    "stop": pb.StopConditions(ignore_eos=True),
}


@pytest.mark.timeout(600)
def test_the_text_is_the_targets(models: Path, tmp_path: Path, processes: Processes) -> None:
    # The target's own layers over every second token: right whenever the target says one of those.
    folder = make_tiny_draft(
        tmp_path / "tokens",
        models / "target",
        layers=(0, 1),
        feature_layers=(),
        window=512,
        head=range(0, 320, 2),
        noise=0,
    )
    target = processes.target("--model", str(models / "target"), *WORKER, "--features", "none")
    draft = processes.draft("--drafter", "model", "--model", str(folder), *WORKER)
    coordinator = processes.coordinator(target, draft, "--overlap", "off")

    greedy = REQUEST | {"sampling": GREEDY}
    alone = coordinator.generate(**greedy | {"gamma": 0})
    together = coordinator.generate(**greedy)
    assert together.tokens == alone.tokens
    told = together.result.speculation
    assert told.per_round[0].proposed == GAMMA, "it needs nothing of the target's"
    assert all(row.proposed for row in told.per_round[:-1])
    assert told.degraded_rounds == 0
    end = 0
    for row in told.per_round[:-1]:
        end += row.emitted
        # A draft is the likeliest even token: rejected where the target's own is odd, and nowhere else.
        assert row.accepted == row.proposed or together.tokens[end - 1] % 2
    assert told.accepted > 0
    assert told.accepted < told.proposed

    sampled = REQUEST | {"seed": 7, "sampling": worker_pb2.SamplingParams(temperature=1.0)}
    coupled = [coordinator.generate(**sampled | {"gamma": gamma}) for gamma in (0, GAMMA)]
    assert coupled[0].tokens == coupled[1].tokens
    assert coupled[1].result.speculation.accepted > 0
