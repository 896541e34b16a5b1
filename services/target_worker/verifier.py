"""Scores drafts: sessions that answer with the target's distribution after each of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions, is_bad
from services.common.engine.session import ModelSession
from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import MAX_GAMMA, Row, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The answer to one request.

    Attributes:
        rows: rows[i] is p for the token that follows tokens[len(tokens) - len(rows) + i].
        timing: What it took.
    """

    rows: list[Row]
    timing: PassTiming


class Verifier:
    """Opens sessions on the target model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def open(self, params: SamplingParams, prompt_length: int, max_new_tokens: int) -> VerifySession:
        """Open a session and reserve its part of the KV cache; waits for its turn where there is no room.

        Args:
            params: How logits become p.
            prompt_length: Tokens of the prompt.
            max_new_tokens: Most tokens that may follow, drafts included.

        Raises:
            InvalidFieldError: They do not fit in the model's context.
            CapacityError: No room, and none in time.
        """
        total, limit = prompt_length + max_new_tokens, self._engine.context_length
        if not 0 < total <= limit:
            raise InvalidFieldError("prompt_length + max_new_tokens", total, f"1 to {limit}, the target's context")
        return VerifySession(await self._engine.open(total), params)


class VerifySession:
    """One sequence on the target."""

    def __init__(self, model: ModelSession, params: SamplingParams) -> None:
        self._model = model
        self._params = params

    async def verify(self, base_length: int, tokens: Sequence[int], rows: int) -> Verification:
        """Keep `base_length` tokens, append `tokens`, return p after each of the last `rows`.

        Repeated, it has the same answer.

        Raises:
            InvalidFieldError: rows, a token id or the length is out of range; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
            CapacityError: The device has no memory left for the pass.
            SessionClosedError: The session was closed before its turn came.
        """
        if not 1 <= rows <= len(tokens):
            raise InvalidFieldError("rows", rows, f"1 to {len(tokens)}, the number of tokens")
        if rows > MAX_GAMMA + 1:
            raise InvalidFieldError("rows", rows, f"at most {MAX_GAMMA + 1}: the most drafts of a round, and one")
        result, timing = await self._model.evaluate(base_length, tokens, rows, self._rows)
        return Verification(result, timing)

    def _rows(self, logits: torch.Tensor) -> list[Row]:
        rows = distributions(logits, self._params)
        if any(is_bad(row) for row in rows):
            # Perhaps the device's fault: keys and values with NaN in them would spoil whoever begins like this.
            self._model.distrust()
        return rows

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()
