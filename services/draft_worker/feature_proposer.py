"""A drafter that is fed with the target's hidden states.

It looks back on a window, so a session of the model holds the end of the text only: from the first position that it has
been given a state of. What is known of the text before that is kept as tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import torch

from services.common.engine.engine import Engine
from services.common.engine.served_draft import Given
from services.common.engine.timing import PassTiming
from services.common.engine.work import MissingStatesError
from services.common.specdec.errors import InvalidFieldError, UnknownPrefixError
from services.common.specdec.partial import Ids
from services.common.specdec.types import MAX_FEATURE_BYTES, Draft
from services.draft_worker.confidence import Calibration
from services.draft_worker.model_proposer import ModelProposeSession
from services.draft_worker.outgrown import Outgrown
from services.draft_worker.proposer import Features, ProposalRequest, SessionRequest
from services.draft_worker.soundness import Soundness
from services.draft_worker.truncation import NO_TRUNCATION, Truncation


class FeatureProposer:
    """Opens sessions on a draft that is fed with the target's hidden states.

    Attributes:
        outgrown: Counts the sessions that have found no room for the whole answer.
    """

    def __init__(
        self, engine: Engine, window: int, width: int, head_ids: Ids, truncation: Truncation = NO_TRUNCATION
    ) -> None:
        """Serve an engine's model.

        Args:
            engine: Runs the draft.
            window: Positions before the end of the text that it is given features of.
            width: Numbers in a feature.
            head_ids: uint32[head], ascending: the tokens that it can propose.
            truncation: What is kept of q.
        """
        self._engine = engine
        self._window = window
        self._width = width
        self._ids = head_ids
        self._truncation = truncation
        self._calibrations = Calibration(), Calibration()
        self._soundness = Soundness()
        self.outgrown = Outgrown()

    async def open(self, request: SessionRequest) -> FeatureProposeSession:
        """Open a session and reserve its KV cache: for the window, and for what may follow, or all that the pool has.

        Raises:
            CapacityError: No room, and none in time.
        """
        # One place more than tokens are fed: for the state after the last one.
        capacity = min(request.prompt_length, self._window) + request.max_new_tokens + 1
        model = await self._engine.open(max(1, min(capacity, self._engine.context_length)))
        calibration = self._calibrations[request.params.temperature == 0]
        drafting = ModelProposeSession(model, request, self._truncation, calibration, self._soundness, self._ids)
        return FeatureProposeSession(drafting, self._width, model.capacity - 1, request.most_tokens, self.outgrown)


class FeatureProposeSession:
    """One sequence on the draft.

    Where features are missing nothing is proposed, which is decided before a token is sampled.
    """

    def __init__(self, model: ModelProposeSession, width: int, capacity: int, longest: int, outgrown: Outgrown) -> None:
        self._model = model
        self._width = width
        # Of the window and what follows it, and of the whole text.
        self._capacity = capacity
        self._longest = longest
        self._outgrown: Outgrown | None = outgrown
        self._text: list[int] = []
        # How much of the text, from its beginning, the model's session has been given, its own drafts included.
        self._told = 0
        # Where the window begins, and one past the last position whose features have come; None before the first have.
        self._origin: int | None = None
        self._end = 0
        # Features that no pass has taken in so far: the first position, and [positions, width].
        self._pending: tuple[int, torch.Tensor] | None = None

    @property
    def timing(self) -> PassTiming:
        """What the last proposal took, so far."""
        return self._model.timing

    async def propose(self, request: ProposalRequest) -> AsyncGenerator[Sequence[Draft], None]:
        """Yield drafts one by one, as they are sampled; see `ProposeSession.propose`.

        Raises:
            InvalidFieldError: Features of a wrong size, of positions that are not in the text, or of too many; or a
                text longer than was reserved.
        """
        request.check_length(self._longest)
        if request.base_length > len(self._text):
            raise UnknownPrefixError(len(self._text))
        came = self._decoded(request.features, request.length) if request.features is not None else None
        self._rebase(request.base_length, request.tokens)
        if came is not None:
            self._take_in(*came)
        if self._origin is None:
            return
        if self._outgrown is not None and len(self._text) - self._origin > self._capacity:
            self._outgrown.note(len(self._text), self._capacity)
            self._outgrown = None
        origin, pending = self._origin, self._pending
        start = max(origin, min(self._told, request.base_length))
        given = Given(pending[0] - origin, pending[1]) if pending is not None else None
        local = dataclasses.replace(request, base_length=start - origin, tokens=self._text[start:])
        self._told = len(self._text)
        drafting = self._model.propose(local, origin=origin, given=given)
        try:
            async for drafts in drafting:
                if self._pending is pending:
                    self._pending = None
                self._text += [draft.token for draft in drafts]
                self._told = len(self._text)
                yield drafts
        except MissingStatesError:
            return
        except UnknownPrefixError as error:
            self._told = origin + error.known_length
            raise UnknownPrefixError(self._told) from error
        finally:
            await drafting.aclose()

    def close(self) -> None:
        """Free the KV cache; a pass that waits for its turn will not run. May be called again."""
        self._model.close()

    def _rebase(self, base_length: int, tokens: Sequence[int]) -> None:
        del self._text[base_length:]
        self._text.extend(tokens)
        self._told = min(self._told, base_length)
        self._end = min(self._end, base_length)
        if self._origin is not None and base_length <= self._origin:
            self._origin = self._pending = None
        elif self._pending is not None:
            first, states = self._pending
            self._pending = (first, states[: self._end - first]) if self._end > first else None

    def _take_in(self, start: int, states: torch.Tensor) -> None:
        """Note features that go on from those that have come; others begin a new window."""
        if self._origin is None or not self._origin <= start <= self._end:
            self._origin = self._told = start
            self._pending = None
        if self._pending is not None and (earlier := start - self._pending[0]) > 0:
            start, states = self._pending[0], torch.cat([self._pending[1][:earlier], states])
        self._pending = start, states
        self._end = start + len(states)

    def _decoded(self, features: Features, total: int) -> tuple[int, torch.Tensor]:
        """Return the first position and the features, [positions, width], of a text of `total` tokens."""
        size, row = len(features.data), 2 * self._width
        if size > MAX_FEATURE_BYTES:
            raise InvalidFieldError("features.data", f"{size} bytes", f"at most {MAX_FEATURE_BYTES}")
        if not size or size % row:
            raise InvalidFieldError("features.data", f"{size} bytes", f"positions of {row} bytes, one or more")
        start, count = features.start, size // row
        # After the last token nothing is known yet: what follows it is what is to be drafted.
        if start + count >= total:
            told = f"positions {start} to {start + count - 1}"
            raise InvalidFieldError("features", told, f"positions before the last of {total} tokens")
        if total - start > self._capacity:
            raise InvalidFieldError(
                "features.start", start, f"at least {total - self._capacity}, for what the session reserved"
            )
        numbers = np.frombuffer(features.data, "<i2").astype(np.int16).reshape(count, self._width)
        return start, torch.from_numpy(numbers).view(torch.bfloat16)
