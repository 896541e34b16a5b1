"""What every drafter offers: sessions that propose the next tokens, each with the distribution it was sampled from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import Draft, SamplingParams, VerificationMode


@dataclass(frozen=True, slots=True)
class Features:
    """The target's hidden states at consecutive positions of the text.

    Attributes:
        start: The first position.
        data: bfloat16, little endian, [positions, width].
    """

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a session is opened with.

    Attributes:
        params: How logits become q.
        seed: Key of the random numbers.
        prompt_length: Tokens of the prompt.
        max_new_tokens: Most tokens that may follow, drafts included.
        rule: What drafts will be verified by: under COUPLED a model draws by the target's noise, to agree with it.
    """

    params: SamplingParams
    seed: int
    prompt_length: int
    max_new_tokens: int
    rule: VerificationMode = VerificationMode.TOKEN

    @property
    def most_tokens(self) -> int:
        """Tokens that the text may grow to."""
        return self.prompt_length + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """What a session is asked for: keep `base_length` tokens, append `tokens`, propose at most `gamma` more.

    Attributes:
        round_index: Names the random numbers, with the session's seed.
        base_length: Tokens of the sequence to keep, its own drafts among them.
        tokens: The ones that follow, int[n].
        gamma: Most tokens to propose.
        features: What has become known of the target's hidden states, for a drafter that is fed with them.
        stop_below: A further token pays where it will be kept with at least this probability; a drafter that can tell
            proposes no others, which it decides before it samples them.
    """

    round_index: int
    base_length: int
    tokens: Sequence[int]
    gamma: int
    features: Features | None = None
    stop_below: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the text that is to be continued."""
        return self.base_length + len(self.tokens)

    def check_length(self, reserved: int) -> None:
        """Check that the text is no longer than its session was opened for: what a session keeps of it is memory.

        Raises:
            InvalidFieldError: It is.
        """
        if self.length > reserved:
            raise InvalidFieldError(
                "base_length + tokens", self.length, f"at most {reserved}, what the session reserved"
            )


class ProposeSession(Protocol):
    """One sequence on a drafter. Its own drafts count as tokens of the sequence."""

    @property
    def timing(self) -> PassTiming:
        """What the last proposal took, so far."""

    def propose(self, request: ProposalRequest) -> AsyncGenerator[Sequence[Draft], None]:
        """Keep `base_length` tokens, append `tokens`, then yield at most `gamma` drafts as they are found.

        Fewer is an answer, decided before a token is sampled. The consumer may stop between two drafts.

        Raises:
            InvalidFieldError: A token id is out of range, or features are; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
        """

    def close(self) -> None:
        """Free what the session holds. May be called again."""


class Proposer(Protocol):
    """Opens sessions on a drafter."""

    async def open(self, request: SessionRequest) -> ProposeSession:
        """Open a session.

        Raises:
            CapacityError: No session is free.
        """
