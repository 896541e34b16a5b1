"""A drafter that is a causal language model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import torch

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions, is_bad
from services.common.engine.served_draft import Given
from services.common.engine.session import ModelSession
from services.common.engine.timing import PassTiming
from services.common.specdec.coupled import winner
from services.common.specdec.partial import Ids
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import Draft, Row, VerificationMode
from services.draft_worker.confidence import Calibration, EarlyStop, Fates
from services.draft_worker.proposer import ProposalRequest, SessionRequest
from services.draft_worker.soundness import Soundness
from services.draft_worker.truncation import NO_TRUNCATION, Truncation


class ModelProposer:
    """Opens sessions on a draft model."""

    def __init__(self, engine: Engine, truncation: Truncation = NO_TRUNCATION, head_ids: Ids | None = None) -> None:
        """Serve an engine's model.

        Args:
            engine: Runs the model.
            truncation: What is kept of q.
            head_ids: uint32[head], ascending: the tokens that its logits are of; None for all.
        """
        self._engine = engine
        self._truncation = truncation
        self._ids = head_ids
        # What is kept at temperature 0 is another matter.
        self._calibrations = Calibration(), Calibration()
        self._soundness = Soundness()

    async def open(self, request: SessionRequest) -> ModelProposeSession:
        """Open a session and reserve its KV cache, for as much of the text as fits in this model's context.

        Raises:
            CapacityError: No room, and none in time.
        """
        capacity = max(1, min(request.most_tokens, self._engine.context_length))
        model = await self._engine.open(capacity)
        calibration = self._calibrations[request.params.temperature == 0]
        return ModelProposeSession(model, request, self._truncation, calibration, self._soundness, self._ids)


class ModelProposeSession:
    """One sequence on the draft. Its last draft is fed to the model only by the next round.

    Attributes:
        timing: What the last proposal took, so far.
    """

    def __init__(
        self,
        model: ModelSession,
        opened: SessionRequest,
        truncation: Truncation,
        calibration: Calibration,
        soundness: Soundness,
        head_ids: Ids | None = None,
    ) -> None:
        self.timing = PassTiming()
        self._model = model
        self._params = truncation.ahead(opened.params)
        self._truncation = truncation
        self._seed = opened.seed
        self._rule = opened.rule
        self._ids = head_ids
        self._calibration = calibration
        self._soundness = soundness
        self._fates = Fates(calibration)

    async def propose(
        self, request: ProposalRequest, *, origin: int = 0, given: Given | None = None
    ) -> AsyncGenerator[Sequence[Draft], None]:
        """Yield drafts one by one, as they are sampled; see `ProposeSession.propose`.

        Args:
            request: What is asked for; its lengths are those of the model's session.
            origin: Where in the text the model's session begins.
            given: The target's states, for a model that is fed with them; see `ModelSession.generate`.

        Raises:
            MissingStatesError: Such a model has too few of them.
        """
        base_length, tokens, length = request.base_length, request.tokens, request.length
        self.timing = PassTiming()
        self._fates.tell(origin + base_length, tokens)
        stop = EarlyStop(self._fates, self._calibration, request.stop_below)
        # As many as the context holds, decided before a token is sampled: to drop one afterwards would bias the text.
        # The last place of a session with states is for the one after its last token.
        count = min(request.gamma, self._model.capacity - length + (0 if self._model.needs_states else 1))
        if length == 0 or count <= 0:
            if 0 < length <= self._model.capacity:
                # The next request builds on these tokens, and drafts of an earlier round may stand in their place.
                self._model.note(base_length, tokens)
            return
        offset = 0

        def draw(logits: torch.Tensor) -> tuple[Draft | None, int | None]:
            """Sample the next token; None where the row is no distribution."""
            nonlocal offset
            (q,) = distributions(logits, self._params)
            broken = is_bad(q)
            self._soundness.judge(broken, origin + length + offset)
            if broken:
                self._model.distrust()
                return None, None
            q = self._truncation.cut(q)
            if self._ids is not None:
                q = Row(q.weights, self._ids if q.ids is None else self._ids[q.ids])
            position = origin + length + offset
            token = self._choose(q, request.round_index, offset, position)
            index = token if self._ids is None else int(np.searchsorted(self._ids, token))
            stop.sampled(position, token, logits, index)
            offset += 1
            return Draft(token, q), token

        drafting = self._model.generate(base_length, tokens, count, draw, given, lambda: stop.goes_on)
        async with contextlib.aclosing(drafting):
            async for draft, timing in drafting:
                self.timing = timing
                if draft is not None:
                    yield [draft]

    def _choose(self, q: Row, round_index: int, offset: int, position: int) -> int:
        """Return the draft at an offset of the round, which is a position of the text."""
        if self._rule is VerificationMode.COUPLED:
            return winner(q, self._seed, position).token
        return sample(q, uniform(self._seed, round_index, offset, Purpose.DRAFT))

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()
