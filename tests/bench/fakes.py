"""Measurements and systems that take no time."""

from __future__ import annotations

from collections.abc import Sequence

from bench.measure import Question
from bench.phases import PHASES
from bench.record import Place, Record, Rounds
from bench.systems import Job, Outcome
from paceline.v1.coordinator_pb2 import RoundStats
from paceline.v1.worker_pb2 import WorkerTiming

HASH = "ab" * 32


def question(question_id: int = 1, category: str = "writing") -> Question:
    return Question(question_id, category, (1, 2, 3))


def rounds(*, count: int = 4, gamma: int = 4, kept: int = 3, draft_pass_ms: float = 4.0) -> Rounds:
    """`count` rounds of `gamma` drafts, in each of which `kept` are kept and the next, if there is one, is not."""
    ms = {"draft pass": draft_pass_ms, "propose": 0.5, "target pass": 20.0, "verify": 1.0, "accept": 0.25, "rest": 0.25}
    tested = tuple(count if i <= kept else 0 for i in range(gamma))
    return Rounds(
        rounds=count,
        proposed=count * gamma,
        tested=tested,
        accepted=tuple(count if i < kept else 0 for i in range(gamma)),
        gammas=tuple(count if i == gamma else 0 for i in range(gamma + 1)),
        ms={name: count * ms.get(name, 0.5) for name in PHASES},
        draft_forward_ms=count * draft_pass_ms,
        p_bytes=count * (gamma + 1) * 1000,
        q_bytes=count * gamma * 100,
        p_rows=count * (gamma + 1),
        fetched_rows=0,
        ran_ahead=0,
        degraded=0,
    )


def measured(
    system: str,
    wall_ms: float,
    *,
    mode: str = "greedy",
    repeat: int = 0,
    unit: str = "1",
    category: str = "writing",
    streams: int = 1,
    inside: Rounds | None = None,
    answer: str = "same",
    tokens: int = 16,
) -> Record:
    return Record(
        place=Place(mode, repeat, unit, category, streams),
        system=system,
        wall_ms=wall_ms,
        tokens=tokens,
        first_token_ms=wall_ms / 5,
        decode_ms=wall_ms * 4 / 5,
        decode_tokens=tokens - 1,
        prompt_tokens=3,
        answer=answer,
        idle_cpu_ms=wall_ms / 100,
        rounds=inside,
    )


def one_round(start_ms: float = 5.0, **fields: float) -> RoundStats:
    given = {
        "gamma": 4,
        "proposed": 4,
        "tested": 3,
        "accepted": 2,
        "total_ms": 60,
        "draft_ms": 12,
        "verify_ms": 45,
        "accept_ms": 2,
        "p_bytes": 500,
        "q_bytes": 40,
    }
    return RoundStats(
        start_ms=start_ms,
        draft=WorkerTiming(forward_ms=10, service_ms=11),
        target=WorkerTiming(queue_ms=0.5, forward_ms=40, service_ms=42),
        **{**given, **fields},  # type: ignore[arg-type]
    )


class FakeSystem:
    """Notes what it is asked; writes as many tokens as it is told to, or another number."""

    def __init__(
        self, name: str, *, weights_hash: str = HASH, extra_tokens: int = 0, inside: Sequence[RoundStats] = ()
    ) -> None:
        self.name = name
        self.jobs: list[Job] = []
        self.inside = tuple(inside)
        self._weights_hash = weights_hash
        self._extra_tokens = extra_tokens

    async def write(self, job: Job) -> Outcome:
        self.jobs.append(job)
        return Outcome(tuple(range(job.tokens + self._extra_tokens)), 0.1, 0.02, 2, self.inside, self._weights_hash)
