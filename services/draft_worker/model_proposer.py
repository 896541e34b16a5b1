"""A drafter that is a causal language model."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np
import torch

from services.common.engine.executor import PassExecutor
from services.common.engine.model import LoadedModel
from services.common.engine.processors import distributions
from services.common.engine.session import ModelSession, warm_up
from services.common.engine.timing import PassTiming
from services.common.specdec.errors import CapacityError
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, SamplingParams

_log = logging.getLogger(__name__)


class ModelProposer:
    """Opens sessions on a draft model."""

    def __init__(
        self, loaded: LoadedModel, executor: PassExecutor, max_sessions: int, prefill_chunk: int = 512
    ) -> None:
        """Serve a model.

        Args:
            loaded: The draft.
            executor: Runs its passes.
            max_sessions: Most sessions open at a time, each with a KV cache.
            prefill_chunk: Most positions fed in one job.
        """
        self._loaded = loaded
        self._executor = executor
        self._max_sessions = max_sessions
        self._prefill_chunk = prefill_chunk
        self._open: set[ModelProposeSession] = set()

    @property
    def sessions_open(self) -> int:
        """How many sessions hold a KV cache."""
        return len(self._open)

    async def open(
        self, params: SamplingParams, seed: int, prompt_length: int, max_new_tokens: int
    ) -> ModelProposeSession:
        """Open a session and reserve its KV cache, for as much of the text as fits in this model's context.

        Raises:
            CapacityError: No session is free.
        """
        if len(self._open) >= self._max_sessions:
            raise CapacityError(f"all {self._max_sessions} sessions of this worker are in use")
        capacity = prompt_length + max_new_tokens
        if self._loaded.context_length:
            capacity = min(capacity, self._loaded.context_length)
        model = ModelSession(self._loaded, self._executor, capacity, self._prefill_chunk)
        session = ModelProposeSession(model, params, seed, self._open)
        self._open.add(session)
        return session

    async def warm_up(self) -> None:
        """Run passes of the usual sizes, so that the first request does not pay for what the first passes set up."""
        await warm_up(self._loaded, self._executor)


class ModelProposeSession:
    """One sequence on the draft. Its last draft is fed to the model only by the next round.

    Attributes:
        timing: What the last proposal took, so far.
    """

    def __init__(
        self, model: ModelSession, params: SamplingParams, seed: int, open_sessions: set[ModelProposeSession]
    ) -> None:
        self.timing = PassTiming()
        self._model = model
        self._params = params
        self._seed = seed
        self._open_sessions = open_sessions

    async def propose(
        self, round_index: int, base_length: int, tokens: Sequence[int], gamma: int
    ) -> AsyncGenerator[Sequence[Draft], None]:
        """Yield drafts one by one, as they are sampled; see `ProposeSession.propose`."""
        self.timing = PassTiming()
        length, new = base_length + len(tokens), tokens
        for offset in range(gamma):
            # Before a token is sampled: to drop one afterwards would bias the text.
            if not 0 < length <= self._model.capacity:
                return
            number = uniform(self._seed, round_index, offset, Purpose.DRAFT)
            draw = partial(self._draw, number=number)
            draft, timing = await self._model.evaluate(length - len(new), new, 1, draw)
            self.timing = self.timing.then(timing.queue_s, timing.forward_s, timing.forward_tokens)
            if draft is None:
                return
            yield [draft]
            length, new = length + 1, ()

    def _draw(self, logits: torch.Tensor, number: float) -> Draft | None:
        """Sample the next token and append it; None where the row is no distribution."""
        (q,) = distributions(logits, self._params)
        if not np.isfinite(q.weights.sum()):
            _log.warning("the draft's logits are not finite after %d tokens", len(self._model.sequence.tokens))
            return None
        token = sample(q, number)
        self._model.sequence.tokens.append(token)
        return Draft(token, q)

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()
        self._open_sessions.discard(self)
