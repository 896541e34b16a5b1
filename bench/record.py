"""One measurement: what a system did in a block, and what its rounds were made of."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.phases import PHASES, phases
from bench.systems import Outcome
from paceline.v1.coordinator_pb2 import RoundStats


@dataclass(frozen=True, slots=True)
class Place:
    """Which block of a run.

    Attributes:
        mode: Key of MODES.
        repeat: From 0.
        unit: What is paired across systems: a question, or a category.
        category: Of its prompts.
        streams: Answers at a time.
    """

    mode: str
    repeat: int
    unit: str
    category: str
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """Sums over the rounds of a block.

    Attributes:
        rounds: How many there were.
        proposed: Drafts that were verified.
        tested: By position in the round, from 0: drafts that the rule looked at.
        accepted: The same: drafts that it kept.
        gammas: How many rounds were meant to have 0, 1, 2, ... drafts.
        ms: By phase, see `phases`.
        draft_forward_ms: In the draft's passes, those that ran while the target verified included.
        p_bytes: Rows received from the target.
        q_bytes: Rows received from the draft.
        p_rows: How many the target's were: one more than drafts in a round.
        fetched_rows: Rows whose tail was fetched.
        ran_ahead: Rounds in which drafting ran ahead.
        degraded: Rounds without the drafts that they were meant to have.
    """

    rounds: int
    proposed: int
    tested: tuple[int, ...]
    accepted: tuple[int, ...]
    gammas: tuple[int, ...]
    ms: dict[str, float]
    draft_forward_ms: float
    p_bytes: int
    q_bytes: int
    p_rows: int
    fetched_rows: int
    ran_ahead: int
    degraded: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one system did in one block.

    Attributes:
        place: The block.
        system: Its name.
        wall_ms: By the client's clock, to the end of the last answer.
        tokens: Written, in all answers.
        first_token_ms: To the first tokens, mean over answers.
        decode_ms: From an answer's first tokens to its end, summed over answers.
        decode_tokens: Written in that time.
        prompt_tokens: In all prompts.
        answer: Hash of the tokens.
        idle_cpu_ms: CPU time of the processes that had nothing to do: for transformers the services, for the service
            this process, which reads its stream.
        rounds: None for transformers.
    """

    place: Place
    system: str
    wall_ms: float
    tokens: int
    first_token_ms: float
    decode_ms: float
    decode_tokens: int
    prompt_tokens: int
    answer: str
    idle_cpu_ms: float
    rounds: Rounds | None

    def row(self) -> dict[str, Any]:
        """Return it as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, row: dict[str, Any]) -> Record:
        """Read what `row` wrote."""
        rounds = row["rounds"]
        if rounds is not None:
            lists = {name: tuple(value) for name, value in rounds.items() if isinstance(value, list)}
            rounds = Rounds(**{**rounds, **lists})
        return cls(**{**row, "place": Place(**row["place"]), "rounds": rounds})


def record(
    place: Place, system: str, prompt_tokens: Sequence[int], outcomes: Sequence[Outcome], wall_s: float, idle_s: float
) -> Record:
    """Sum up the answers of one block."""
    rounds = [outcome.rounds for outcome in outcomes]
    return Record(
        place=place,
        system=system,
        wall_ms=wall_s * 1e3,
        tokens=sum(len(outcome.tokens) for outcome in outcomes),
        first_token_ms=sum(outcome.first_token_s for outcome in outcomes) / len(outcomes) * 1e3,
        decode_ms=sum(outcome.wall_s - outcome.first_token_s for outcome in outcomes) * 1e3,
        decode_tokens=sum(len(outcome.tokens) - outcome.first_tokens for outcome in outcomes),
        prompt_tokens=sum(prompt_tokens),
        answer=hashlib.blake2b(repr([outcome.tokens for outcome in outcomes]).encode(), digest_size=8).hexdigest(),
        idle_cpu_ms=idle_s * 1e3,
        rounds=_sums(rounds) if rounds[0] else None,
    )


def _sums(answers: Sequence[Sequence[RoundStats]]) -> Rounds:
    every = [each for rounds in answers for each in rounds]
    parts = [part for rounds in answers for part in phases(rounds)]
    # A round whose last row tests a draft that ran ahead tests one more than it was meant to have.
    places = range(max(each.tested for each in every))
    return Rounds(
        rounds=len(every),
        proposed=sum(each.proposed for each in every),
        tested=tuple(sum(each.tested > i for each in every) for i in places),
        accepted=tuple(sum(each.accepted > i for each in every) for i in places),
        gammas=tuple(sum(each.gamma == i for each in every) for i in range(max(each.gamma for each in every) + 1)),
        ms={name: sum(part[name] for part in parts) for name in PHASES},
        draft_forward_ms=sum(each.draft.forward_ms for each in every),
        p_bytes=sum(each.p_bytes for each in every),
        q_bytes=sum(each.q_bytes for each in every),
        p_rows=sum(each.proposed + 1 for each in every),
        fetched_rows=sum(each.fetched_rows for each in every),
        ran_ahead=sum(each.ran_ahead for each in every),
        degraded=sum(each.degraded for each in every),
    )
