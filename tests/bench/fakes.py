"""Runs and systems that take no time."""

from __future__ import annotations

from bench.costs import RoundCost
from bench.measure import Question, Run
from bench.systems import Job, Outcome

HASH = "ab" * 32


def question(question_id: int = 1) -> Question:
    return Question(question_id, "writing", (1, 2, 3))


def cost(own: float, drafts: int = 0) -> RoundCost:
    return RoundCost(
        drafts=drafts,
        total=50 + own,
        forward=50.0,
        own=own,
        draft=own,
        wire=0.0,
        worker=0.0,
        accept=0.0,
        rest=0.0,
        between=0.25,
    )


def run(mode: str, system: str, *, wall_ms: float, question_id: int = 1, repeat: int = 0, own: float = 1.0) -> Run:
    ours = system != "transformers"
    return Run(
        mode=mode,
        system=system,
        repeat=repeat,
        question=question(question_id),
        wall_ms=wall_ms,
        first_token_ms=30.0 if ours else None,
        tokens=(7, 8, 9, 10),
        drafts_tested=4 if system == "paceline" else 0,
        drafts_accepted=3 if system == "paceline" else 0,
        costs=(cost(own), cost(own + 1, drafts=4 if system == "paceline" else 0)) if ours else (),
        idle_cpu_ms=None if ours else 0.5,
    )


class FakeSystem:
    """Notes what it is asked; writes as many tokens as it is told to, or another number."""

    def __init__(self, name: str, *, weights_hash: str = HASH, extra_tokens: int = 0) -> None:
        self.name = name
        self.jobs: list[Job] = []
        self._weights_hash = weights_hash
        self._extra_tokens = extra_tokens

    async def write(self, job: Job) -> Outcome:
        self.jobs.append(job)
        return Outcome(tuple(range(job.tokens + self._extra_tokens)), 0.1, None, (), self._weights_hash)
