"""The words of the rounds: what a request asks for, what a worker's call cost, what a round did."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.specdec.types import Decision, SamplingParams, VerificationMode
from services.coordinator.answer import Finish, StopRules


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a worker, as seen from here and as told by the worker's own clock.

    Attributes:
        elapsed_s: From sending the request to having the reply.
        queue_s: Waiting for the worker's device.
        forward_s: In forward passes.
        service_s: In the worker altogether; `elapsed_s` less this is the wire.
        forward_tokens: Positions that were fed to the model.
        row_bytes: Bytes of the rows received.
        model: What the worker serves.
        worker: Which worker answered; empty where none did.
        batch_size: Sessions in the largest pass that the call shared.
        reused_tokens: Positions of the prompt taken from another session's cache.
        pass_tokens: Positions in that largest pass, those of all its sessions together.
    """

    elapsed_s: float = 0.0
    queue_s: float = 0.0
    forward_s: float = 0.0
    service_s: float = 0.0
    forward_tokens: int = 0
    row_bytes: int = 0
    model: str = ""
    worker: str = ""
    batch_size: int = 0
    reused_tokens: int = 0
    pass_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for, checked and with every default filled in.

    Attributes:
        request_id: For logs, traces and errors.
        prompt: Token ids.
        params: How p and q are made from logits.
        seed: Key of all random numbers of the request.
        max_tokens: Most tokens to generate.
        gamma: Drafts in a round; the most that there may be where gamma is adaptive.
        stop: When the answer ends before that.
        vocab_size: Entries of a row.
        verification: The rule.
        may_adapt: Gamma may follow the clock, and drafting may run ahead. Not under TOKEN with a seed that the client
            gave: the tokens would depend on both.
        adaptive_gamma: Gamma is chosen round by round.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    gamma: int
    stop: StopRules
    vocab_size: int
    verification: VerificationMode = VerificationMode.TOKEN
    may_adapt: bool = True
    adaptive_gamma: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did.

    Attributes:
        index: Names the round's random numbers.
        gamma: Drafts asked for.
        proposed: Drafts sent to the target, and one more where its last row has tested the first that ran ahead.
        decision: What the rule made of them.
        tokens: The tokens that count, up to the first stop.
        finish: Why the answer ends with this round, or None.
        degraded: Why there were fewer drafts than there should have been; empty if there were not.
        draft: The call of the draft worker.
        target: The call of the target worker.
        start_s: Since the request began.
        total_s: Of the whole round.
        accept_s: Checking rows, and the rule; fetching rows too.
        draft_wait_s: Waiting for the drafts; less than the call took where it began in the round before.
        ran_ahead: Drafting went on while the round was verified.
        fetched: Bytes of each row of p that more was needed of than had come.
    """

    index: int
    gamma: int
    proposed: int
    decision: Decision
    tokens: tuple[int, ...]
    finish: Finish | None
    degraded: str
    draft: Call
    target: Call
    start_s: float
    total_s: float
    accept_s: float
    draft_wait_s: float = 0.0
    ran_ahead: bool = False
    fetched: tuple[int, ...] = ()
