"""Biases that peers shipped, and those that invariants 5 and 7 forbid: each one planted, for the counting to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.specdec.acceptance import Uniforms, accept, residual, usable_drafts
from services.common.specdec.coupled import Winner, accept_coupled, winner
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.types import Decision, Draft, Origin, Row, SamplingParams
from tests.support.laws import Law, Table, blind, context, far, process, row
from tests.support.scripts import NEVER, BadRow, DraftScript, TargetScript, Turn

PLAIN = SamplingParams()
PROCESSED = SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.2)
COLD = SamplingParams(temperature=0.3)


@dataclass(frozen=True)
class Plant:
    """One bias.

    Attributes:
        name: What is wrong.
        draft: The draft that does it.
        target: The target that does it.
        patches: Functions of the coordinator that do it, by their full name.
        params: Sampling parameters under which it shows.
        settings: Of the coordinator.
        requests: Answers of 60 tokens that show it.
        law: Makes the law under which it shows from that of the undisturbed run.
    """

    name: str
    draft: DraftScript = field(default_factory=DraftScript)
    target: TargetScript = field(default_factory=TargetScript)
    patches: dict[str, Callable[..., Any]] = field(default_factory=dict)
    params: SamplingParams = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)
    requests: int = 30
    law: Callable[[Law], Law] = lambda law: law


# --- Field notes, fault 1: the q that is reported is not the q that was sampled from. -------------------------------


class ReportsRawLogits(DraftScript):
    def reported(self, turn: Turn) -> Row:
        return turn.law.q_rows(PLAIN)[context(turn.tokens)]


class DraftsGreedily(DraftScript):
    def draw(self, turn: Turn, offset: int) -> int:
        return int(np.argmax(turn.q.dense(turn.law.vocab_size)))


class IgnoresTemperature(DraftScript):
    def sampled(self, turn: Turn) -> Row:
        return turn.law.q_rows(PLAIN)[context(turn.tokens)]


class SamplesInBfloat16(DraftScript):
    def sampled(self, turn: Turn) -> Row:
        return row(process(to_bfloat16(turn.law.q_logits[context(turn.tokens)]), turn.params))


def to_bfloat16(values: Table) -> Table:
    """Round to the nearest bfloat16."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


# --- Fault 2: top-p the wrong way round. ----------------------------------------------------------------------------


class DeletesTheHead(TargetScript):
    def p(self, turn: Turn) -> Row:
        probabilities = turn.law.p(SamplingParams(turn.params.temperature))[context(turn.tokens)]
        order = np.argsort(probabilities)
        before = np.cumsum(probabilities[order]) - probabilities[order]
        kept = np.where(np.isin(np.arange(len(order)), order[before < turn.params.top_p]), probabilities, 0.0)
        return row(kept / kept.sum())


# --- Invariant 5: whether a draft is tested depends on its value. ---------------------------------------------------


class DropsUnsureDrafts(DraftScript):
    """Early stop after sampling: a token that the draft itself finds unlikely is thrown away."""

    def keeps(self, turn: Turn, token: int, q: Row) -> bool:
        return q.weight(token) > 0.25


class StopsBeforeUnsureDrafts(DraftScript):
    """The lawful form of it: whether to stop is decided by the row, before sampling."""

    def goes_on(self, turn: Turn, offset: int) -> bool:
        return bool(turn.q.weights.max() > 0.4)


class HoldsBackByValue(DraftScript):
    """Late, but only with token 0, and never with the first draft: a draft that sends nothing is not asked again."""

    def pause_s(self, turn: Turn, offset: int, token: int) -> float:
        return NEVER if token == 0 and offset > 0 else 0.0


def usable_by_own_token(drafts: Sequence[Draft], vocab_size: int) -> tuple[int, str]:
    """Judge a row by its draft's own entry only."""
    for i, draft in enumerate(drafts):
        if not draft.q.weight(draft.token) > 0:
            return i, "own entry"
    return len(drafts), ""


def accept_mended(p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, uniforms: Uniforms) -> Decision:
    """Apply the rule with every NaN in q made what it was, so that only which drafts are tested is at fault."""
    mended = [Draft(d.token, Row(np.where(np.isnan(d.q.weights), _rest(d.q), d.q.weights))) for d in drafts]
    return accept(p_rows, mended, vocab_size, uniforms)


def _rest(bad: Row) -> float:
    return 1 - float(np.nansum(bad.weights.astype(np.float64)))


def all_usable(drafts: Sequence[Draft], vocab_size: int) -> tuple[int, str]:
    """Judge nothing."""
    return len(drafts), ""


def accept_untested(p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, uniforms: Uniforms) -> Decision:
    """Skip the test of a draft whose row is bad, and go on with those after it."""
    passed = [d if usable_drafts([d], vocab_size)[0] else Draft(d.token, p) for d, p in zip(drafts, p_rows)]  # noqa: B905
    return accept(p_rows, passed, vocab_size, uniforms)


# --- Invariant 7: a number serves two decisions. --------------------------------------------------------------------


class DraftsAgainAfterToken0(DraftScript):
    """Draft only where the discarded draft at this position was token 0: lawful, since numbers are never used again."""

    def goes_on(self, turn: Turn, offset: int) -> bool:
        return turn.discarded in (None, 0)


class NumbersByPosition(DraftsAgainAfterToken0):
    """The same with numbers keyed by position: the discarded draft's number comes back."""

    def number(self, turn: Turn, offset: int) -> float:
        return uniform(turn.seed, 0, len(turn.tokens), Purpose.DRAFT)


# --- All of them. ---------------------------------------------------------------------------------------------------

RULE = "services.common.specdec.acceptance"
LOOP = "services.coordinator.loop"
DECIDE = "services.coordinator.decide"


def _trust(checked: Row, vocab_size: int) -> None:
    """Check nothing."""


def _target_itself(p: Row, q: Row) -> Row:
    return p


PLANTS = (
    Plant("1 reports q of raw logits", draft=ReportsRawLogits(), params=PROCESSED),
    Plant("1 drafts greedily, reports q", draft=DraftsGreedily()),
    Plant("1 drafts at temperature 1", draft=IgnoresTemperature(), params=COLD),
    Plant("1 samples in bfloat16", draft=SamplesInBfloat16(), params=SamplingParams(temperature=0.5), requests=100),
    Plant("2 top-p deletes the head", target=DeletesTheHead(), params=SamplingParams(top_p=0.8)),
    Plant("3 corrects with p, not the residual", patches={f"{RULE}.residual": _target_itself}, law=far),
    Plant(
        "8 NaN p is a plausible token",
        target=TargetScript(BadRow.NAN, 1),
        patches={f"{RULE}.check_row": _trust},
        law=far,
    ),
    Plant("8 NaN q passes", draft=DraftScript(BadRow.NAN, 1), patches={f"{RULE}.check_row": _trust}),
    Plant(
        "5 bad row judged by its token",
        draft=DraftScript(BadRow.NAN, 1),
        patches={f"{LOOP}.usable_drafts": usable_by_own_token, f"{DECIDE}.accept": accept_mended},
    ),
    Plant(
        "5 bad row passes, those after it tested",
        draft=DraftScript(BadRow.NAN, 1),
        patches={f"{LOOP}.usable_drafts": all_usable, f"{DECIDE}.accept": accept_untested},
        law=far,
    ),
    Plant(
        "5 late by value",
        draft=HoldsBackByValue(one_by_one=True),
        # Longer than a draft takes with all requests at once on a busy machine: those that are late are meant to be. A
        # late draft is not asked again soon, so that a request has few drafts to show it.
        settings={"draft_timeout_s": 0.3},
        requests=256,
        law=blind,
    ),
    Plant("5 early stop after sampling", draft=DropsUnsureDrafts()),
    Plant("7 numbers keyed by position", draft=NumbersByPosition(), law=blind, requests=200),
)

LAWFUL = (
    Plant("bad row at the first position", draft=DraftScript(BadRow.NAN, 0)),
    Plant("bad row at a later position", draft=DraftScript(BadRow.NAN, 1)),
    Plant(
        "late from the second draft on",
        draft=DraftScript(late_at=1, one_by_one=True),
        settings={"draft_timeout_s": 0.05},
    ),
    Plant("stops before unsure drafts", draft=StopsBeforeUnsureDrafts()),
    Plant("drafts again by what was discarded", draft=DraftsAgainAfterToken0(), law=blind),
)
"""Disturbances that leave the law alone: each must pass."""


# --- The coupled rule. ----------------------------------------------------------------------------------------------


def winner_of_two_positions(row: Row, seed: int, position: int) -> Winner:
    """Use each position's noise for the next one too."""
    return winner(row, seed, position // 2)


def accept_by_offset(
    p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, seed: int, position: int
) -> Decision:
    """Key noise by the offset in the round."""
    return accept_coupled(p_rows, drafts, vocab_size, seed, 0)


def accept_with_the_last_noise_again(
    p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, seed: int, position: int
) -> Decision:
    """Choose the token after drafts that are all kept by the noise of the last of them."""
    honest = accept_coupled(p_rows, drafts, vocab_size, seed, position)
    if honest.origin is not Origin.BONUS:
        return honest
    token = winner(p_rows[-1], seed, position + len(drafts) - 1).token
    return dataclasses.replace(honest, tokens=(*honest.tokens[:-1], token))


def accept_and_mend(
    p_rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int, seed: int, position: int
) -> Decision:
    """Replace a draft from the residual, as the plain rule does."""
    honest = accept_coupled(p_rows, drafts, vocab_size, seed, position)
    if honest.origin is not Origin.RESIDUAL:
        return honest
    at = honest.accepted
    token = winner(residual(p_rows[at], drafts[at].q), seed, position + at).token
    return dataclasses.replace(honest, tokens=(*honest.tokens[:-1], token))


COUPLED_PLANTS = (
    Plant("noise shared by two positions", patches={"services.common.specdec.coupled.winner": winner_of_two_positions}),
    Plant("noise keyed by offset", patches={f"{DECIDE}.accept_coupled": accept_by_offset}),
    Plant("bonus by the last draft's noise", patches={f"{DECIDE}.accept_coupled": accept_with_the_last_noise_again}),
    Plant("replaces from the residual", patches={f"{DECIDE}.accept_coupled": accept_and_mend}, law=far),
)
