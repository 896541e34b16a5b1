"""What a round needs of the world: a drafter and a verifier. Clients implement them over gRPC, tests in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from opentelemetry.trace import Span

from services.common.specdec.partial import AnyRow, Ids
from services.common.specdec.types import Draft
from services.coordinator.types import Call, Round

NO_CALL = Call()

Fetch: TypeAlias = Callable[[int, Ids | None, Span], Awaitable[AnyRow]]
"""Gets one of a round's rows again, by its index: over a support, or whole for None. The span is of the wait."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of one round, possibly none.

    Attributes:
        drafts: In order.
        call: How the drafter was asked.
        degraded: Why there are fewer drafts than a healthy drafter would have given; empty if there are not.
    """

    drafts: tuple[Draft, ...] = ()
    call: Call = NO_CALL
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """The target's rows for one round: rows[i] is p for the token after the first i drafts, len(drafts) + 1 of them.

    Attributes:
        rows: Whole or in part.
        call: How the target was asked.
        fetch: Returns one of the rows again: over another support, or whole for None. Raises as `Verifier.verify`.
        fetched: Bytes of each row that has been fetched.
    """

    rows: tuple[AnyRow, ...]
    call: Call
    fetch: Fetch
    fetched: list[int] = field(default_factory=list)


class TargetUnavailableError(Exception):
    """No target could be had in the time there was; the message says what was tried."""


class TargetFullError(TargetUnavailableError):
    """The targets that could be had have no room for another session."""


class TargetChangedError(Exception):
    """Another model is the target now, and the request has had nothing from the one that it was planned for."""


class Drafter(Protocol):
    """Proposes tokens. Losing it costs time, never a token, so it never raises."""

    async def propose(
        self,
        round_index: int,
        committed: Sequence[int],
        gamma: int,
        span: Span,
        *,
        stop_below: float = 0.0,
        held: Sequence[int] = (),
        arrived: list[Draft] | None = None,
    ) -> Proposal:
        """Propose up to `gamma` tokens to follow `committed` and `held`, within the drafter's time limit.

        May be cancelled at any moment, and the next call then replaces what was asked for.

        Args:
            round_index: Names the random numbers of this proposal; never used twice.
            committed: The text.
            gamma: Most tokens to propose.
            span: Goes along with the request.
            stop_below: A further token pays where it will be kept with at least this probability.
            held: Drafts of an earlier proposal that this one goes on from; they may yet be rejected.
            arrived: Filled with the drafts as they come, for those who do not wait for the end.
        """
        ...

    async def close(self) -> None:
        """Free the session, at the worker too."""
        ...


class Verifier(Protocol):
    """Scores drafts with the target."""

    async def verify(
        self, round_index: int, committed: Sequence[int], drafts: Sequence[Draft], span: Span, *, states: bool = True
    ) -> Verification:
        """Return p after `committed` and after each draft: of each row perhaps no more than testing a draft needs.

        A lost worker is replaced behind this call: the request says where it starts, so another worker can answer it.

        Args:
            round_index: Names the round.
            committed: The text.
            drafts: To score.
            span: Goes along with the request.
            states: Fetch the hidden states that the draft lacks: it may be asked for drafts in the next round.

        Raises:
            TargetChangedError: Another model is the target now, and this one has answered nothing yet.
            TargetUnavailableError: No worker could be had in time.
        """
        ...

    async def close(self) -> None:
        """Free the session, at the worker too."""
        ...


class Observer(Protocol):
    """Watches the rounds of one request: spans and metrics."""

    def round(self, index: int, gamma: int, context_length: int) -> AbstractContextManager[Span]:
        """Open the span of a round."""
        ...

    def phase(self, name: str, parent: Span, index: int | None = None) -> AbstractContextManager[Span]:
        """Open the span of a part of a round; `index` where that is not the round's own."""
        ...

    def finish_round(self, span: Span, done: Round) -> None:
        """Note what a round did, just before its span ends."""
        ...
