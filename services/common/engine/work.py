"""One request of a session, from its arrival to its last pass."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from services.common.engine.kv_memory import Lease
from services.common.engine.runner import Feed
from services.common.engine.served_draft import Given
from services.common.engine.timing import PassTiming

if TYPE_CHECKING:
    from services.common.engine.session import ModelSession


class SessionClosedError(Exception):
    """The session was closed before this request had its turn."""


class MissingStatesError(Exception):
    """A draft lacks the target's states before some of the tokens that it has to be fed; it has taken the tokens in."""


class Work:
    """A request: what it brings, how far it is, and what becomes of its logits.

    Attributes:
        session: Whose sequence it extends.
        rows: Logits are wanted after each of its last `rows` tokens.
        step: Takes those logits; returns the token to append, None when there is none and the request is done.
        done: Resolved in the event loop of the request when its last step is done, or with what went wrong.
        cancelled: Nobody waits any more; no further pass is run for it.
        begun: Its tokens are in the session's sequence.
        pending: Positions to feed, valid once begun.
        timing: What it took so far.
        context: Of whoever asked for it.
    """

    def __init__(
        self,
        session: ModelSession,
        base_length: int,
        tokens: Sequence[int],
        rows: int,
        step: Callable[[torch.Tensor], int | None],
        steps: int = 1,
        given: Given | None = None,
    ) -> None:
        self.session = session
        self.rows = rows
        # In the caller's context, so that what it logs on the engine's thread is told of the caller's request.
        self.context = context = contextvars.copy_context()
        self.step: Callable[[torch.Tensor], int | None] = lambda logits: context.run(step, logits)
        self.cancelled = False
        self.begun = False
        self.pending = 0
        self.timing = PassTiming()
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self._base_length = base_length
        self._tokens = tokens
        self._steps = steps
        self._given = given
        self._submitted_s = time.perf_counter()

    @property
    def lease(self) -> Lease:
        """The session's places.

        Raises:
            SessionClosedError: It has none any more.
        """
        if self.session.lease is None:
            raise SessionClosedError
        return self.session.lease

    def begin(self) -> None:
        """Bring the request's tokens into the sequence.

        Raises:
            UnknownPrefixError: It starts past the end of the sequence; nothing has changed.
            SessionClosedError: The session is closed.
            MissingStatesError: There are tokens before which no state is known.
        """
        lease = self.lease
        sequence = lease.sequence
        sequence.rebase(self._base_length, self._tokens)
        if self.session.needs_states:
            # The state before a token follows from the tokens before it.
            lease.stated = max(1, min(lease.stated, self._base_length + 1))
            if self._stated(lease.stated) < len(sequence.tokens):
                raise MissingStatesError
            if self._given is not None:
                # What was fed with a guess in the place of a state is fed again.
                sequence.cached = min(sequence.cached, self._given.start + 1)
        self.pending = len(sequence.pending(self.rows))
        self.begun = True

    def feed(self, count: int, complete: bool) -> Feed:
        """Return the next `count` positions, with the logits that are wanted where they are the last ones."""
        lease = self.lease
        tokens = lease.tokens[lease.cached : lease.cached + count]
        return Feed(lease.start, lease.cached, tokens, self.rows if complete else 0, self._given)

    def reuse(self, length: int) -> None:
        """Note that the first `length` positions have come from another session's cache."""
        sequence = self.lease.sequence
        self.timing = dataclasses.replace(self.timing, reused_tokens=length - sequence.cached)
        sequence.cached = length
        self.pending = len(sequence.tokens) - length

    def start_pass(self, batch_size: int, positions: int) -> None:
        """Note the pass that begins; the first one ends the wait."""
        if not self.timing.batch_size:
            self.timing = dataclasses.replace(self.timing, queue_s=time.perf_counter() - self._submitted_s)
        if batch_size >= self.timing.batch_size:
            self.timing = dataclasses.replace(self.timing, batch_size=batch_size, pass_tokens=positions)

    def fed(self, count: int) -> None:
        """Note that `count` more positions are cached."""
        lease = self.lease
        lease.sequence.cached += count
        self.pending -= count
        if self.session.needs_states:
            lease.stated, self._given = self._stated(lease.stated), None
            if not self.pending and self.rows == 1:
                # Its own state after the last token is known too.
                lease.stated = max(lease.stated, lease.cached + 1)
        self.timing = dataclasses.replace(self.timing, forward_tokens=self.timing.forward_tokens + count)

    def _stated(self, before: int) -> int:
        """Return before how many of the first tokens a state is known, what is given now included."""
        given = self._given
        return max(before, given.end + 1) if given is not None and given.start < before else before

    def spent(self, seconds: float) -> None:
        """Add to the time in passes."""
        self.timing = dataclasses.replace(self.timing, forward_s=self.timing.forward_s + seconds)

    def end(self) -> None:
        """Let the next token that is drawn be the last."""
        self._steps = 1

    def append(self, token: int) -> bool:
        """Append a token that was drawn; return whether it is fed in the next pass, for there is a step to come."""
        self.lease.sequence.tokens.append(token)
        self._steps -= 1
        self.pending, self.rows = 1, 1
        return self._steps > 0

    def finish(self, error: Exception | None = None) -> None:
        """Resolve `done`, from whatever thread."""

        def resolve() -> None:
            if self.done.done():
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(resolve)
