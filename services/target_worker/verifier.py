"""Scores drafts: sessions that answer with the target's distribution after each of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions, is_bad
from services.common.engine.session import ModelSession
from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.types import MAX_FEATURE_BYTES, MAX_GAMMA, Row, SamplingParams

Choice = Callable[[Row, int], tuple[int, float]]
"""Chooses from (the tail of) a row, given its position in the text: the token, and its score."""


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """The answer to one request.

    Attributes:
        rows: rows[i] is p for the token that follows tokens[len(tokens) - len(rows) + i].
        timing: What it took; nothing where the rows were at hand.
        features: The hidden states that were asked for, bfloat16[positions, width]; None where none are kept.
    """

    rows: list[Row]
    timing: PassTiming
    features: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The rows of the last pass, and the request that they answered."""

    base_length: int
    tokens: list[int]
    rows: list[Row]

    def answers(self, base_length: int, tokens: Sequence[int], rows: int) -> bool:
        """Return whether these are the rows of that request, which may start later in the same sequence."""
        skipped = base_length - self.base_length
        return rows == len(self.rows) and skipped >= 0 and self.tokens[skipped:] == list(tokens)


class Verifier:
    """Opens sessions on the target model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def open(
        self, params: SamplingParams, prompt_length: int, max_new_tokens: int, choice: Choice | None = None
    ) -> VerifySession:
        """Open a session and reserve its part of the KV cache; waits for its turn where there is no room.

        Args:
            params: How logits become p.
            prompt_length: Tokens of the prompt.
            max_new_tokens: Most tokens that may follow, drafts included.
            choice: Under COUPLED, how a token is chosen.

        Raises:
            InvalidFieldError: They do not fit in the model's context.
            CapacityError: No room, and none in time.
        """
        total, limit = prompt_length + max_new_tokens, self._engine.context_length
        if not 0 < total <= limit:
            raise InvalidFieldError("prompt_length + max_new_tokens", total, f"1 to {limit}, the target's context")
        return VerifySession(await self._engine.open(total), params, choice)


class VerifySession:
    """One sequence on the target.

    Attributes:
        choice: Under COUPLED, how a token is chosen.
    """

    def __init__(self, model: ModelSession, params: SamplingParams, choice: Choice | None = None) -> None:
        self.choice = choice
        self._model = model
        self._params = params
        self._held: _Held | None = None

    async def verify(
        self,
        base_length: int,
        tokens: Sequence[int],
        rows: int,
        *,
        hold: bool = False,
        features_from: int | None = None,
    ) -> Verification:
        """Keep `base_length` tokens, append `tokens`, return p after each of the last `rows`.

        Repeated, it has the same answer.

        Args:
            base_length: Tokens of the sequence to keep.
            tokens: The ones that follow.
            rows: How many rows.
            hold: Keep the rows until the next request, for `fetch`.
            features_from: Return the hidden states from this position on too, if they are kept; None wants none.

        Raises:
            InvalidFieldError: rows, a token id, a position or the length is out of range; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
            CapacityError: The device has no memory left for the pass.
            SessionClosedError: The session was closed before its turn came.
        """
        _check_rows(tokens, rows)
        if features_from is not None:
            self._check_features(features_from, base_length + len(tokens))
        self._held = None

        def use(logits: torch.Tensor) -> tuple[list[Row], bytes | None]:
            return self._rows(logits), None if features_from is None else self._model.features(features_from)

        (result, features), timing = await self._model.evaluate(base_length, tokens, rows, use)
        if hold:
            self._held = _Held(base_length, list(tokens), result)
        return Verification(result, timing, features)

    async def fetch(self, base_length: int, tokens: Sequence[int], rows: int, index: int) -> Verification:
        """Return one of the rows that `verify` returned for the same request: from the last pass, else by another.

        Raises:
            InvalidFieldError: `index` is out of range; or as `verify`, whose other errors may come too.
        """
        _check_rows(tokens, rows)
        if not 0 <= index < rows:
            raise InvalidFieldError("fetch", index, f"0 to {rows - 1}: one of the rows")
        if self._held is not None and self._held.answers(base_length, tokens, rows):
            return Verification([self._held.rows[index]], PassTiming())
        verified = await self.verify(base_length, tokens, rows, hold=True)
        return Verification([verified.rows[index]], verified.timing)

    def _check_features(self, start: int, total: int) -> None:
        if start >= total:
            raise InvalidFieldError("features_from", start, f"below {total}, the length of the sequence")
        most = MAX_FEATURE_BYTES // self._model.feature_bytes if self._model.feature_bytes else total
        if total - start > most:
            raise InvalidFieldError(
                "features_from",
                start,
                f"at least {total - most}: a reply carries {MAX_FEATURE_BYTES >> 20} MiB of features",
            )

    def _rows(self, logits: torch.Tensor) -> list[Row]:
        rows = distributions(logits, self._params)
        if bad := sum(map(is_bad, rows)):
            # Perhaps the device's fault: keys and values with NaN in them would spoil whoever begins like this.
            self._model.distrust(bad)
        return rows

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()


def _check_rows(tokens: Sequence[int], rows: int) -> None:
    if not 1 <= rows <= len(tokens):
        raise InvalidFieldError("rows", rows, f"1 to {len(tokens)}, the number of tokens")
    if rows > MAX_GAMMA + 1:
        raise InvalidFieldError("rows", rows, f"at most {MAX_GAMMA + 1}: the most drafts of a round, and one")
