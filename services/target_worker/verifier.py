"""Scores drafts: sessions that answer with the target's distribution after each of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.engine.executor import PassExecutor
from services.common.engine.model import LoadedModel
from services.common.engine.processors import distributions
from services.common.engine.session import ModelSession, warm_up
from services.common.engine.timing import PassTiming
from services.common.specdec.errors import CapacityError, InvalidFieldError
from services.common.specdec.types import Row, SamplingParams


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

    def __init__(
        self, loaded: LoadedModel, executor: PassExecutor, max_sessions: int, prefill_chunk: int = 512
    ) -> None:
        """Serve a model.

        Args:
            loaded: The target.
            executor: Runs its passes.
            max_sessions: Most sessions open at a time, each with a KV cache.
            prefill_chunk: Most positions fed in one job.
        """
        self._loaded = loaded
        self._executor = executor
        self._max_sessions = max_sessions
        self._prefill_chunk = prefill_chunk
        self._open: set[VerifySession] = set()

    @property
    def sessions_open(self) -> int:
        """How many sessions hold a KV cache."""
        return len(self._open)

    async def open(self, params: SamplingParams, prompt_length: int, max_new_tokens: int) -> VerifySession:
        """Open a session and reserve its KV cache.

        Args:
            params: How logits become p.
            prompt_length: Tokens of the prompt.
            max_new_tokens: Most tokens that may follow, drafts included.

        Raises:
            InvalidFieldError: They do not fit in the model's context.
            CapacityError: No session is free.
        """
        total, limit = prompt_length + max_new_tokens, self._loaded.context_length
        if limit and total > limit:
            raise InvalidFieldError("prompt_length + max_new_tokens", total, f"at most {limit}, the target's context")
        if len(self._open) >= self._max_sessions:
            raise CapacityError(f"all {self._max_sessions} sessions of this worker are in use")
        model = ModelSession(self._loaded, self._executor, total, self._prefill_chunk)
        session = VerifySession(model, params, self._open)
        self._open.add(session)
        return session

    async def warm_up(self) -> None:
        """Run passes of the usual sizes, so that the first request does not pay for what the first passes set up."""
        await warm_up(self._loaded, self._executor)


class VerifySession:
    """One sequence on the target."""

    def __init__(self, model: ModelSession, params: SamplingParams, open_sessions: set[VerifySession]) -> None:
        self._model = model
        self._params = params
        self._open_sessions = open_sessions

    async def verify(self, base_length: int, tokens: Sequence[int], rows: int) -> Verification:
        """Keep `base_length` tokens, append `tokens`, return p after each of the last `rows`.

        Repeated, it has the same answer.

        Raises:
            InvalidFieldError: rows, a token id or the length is out of range; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
            SessionClosedError: The session was closed before its turn came.
        """
        if not 1 <= rows <= len(tokens):
            raise InvalidFieldError("rows", rows, f"1 to {len(tokens)}, the number of tokens")
        result, timing = await self._model.evaluate(
            base_length, tokens, rows, lambda logits: distributions(logits, self._params)
        )
        return Verification(result, timing)

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()
        self._open_sessions.discard(self)
