"""One sequence on one model, as its owner sees it: requests go in, what was made of their logits comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from services.common.engine.kv_memory import Lease
from services.common.engine.served_draft import Given
from services.common.engine.timing import PassTiming
from services.common.engine.work import Work
from services.common.specdec.errors import InvalidFieldError

if TYPE_CHECKING:
    from services.common.engine.engine import Engine

T = TypeVar("T")


class ModelSession:
    """A sequence, and the places of the KV pool that are reserved for it.

    Attributes:
        capacity: Most tokens that can be fed.
        lease: The places; None once closed.
        needs_states: The model is a draft that is fed with the target's states.
    """

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self.capacity = lease.length
        self.lease: Lease | None = lease
        self.needs_states = engine.needs_states
        self._engine = engine

    async def evaluate(
        self, base_length: int, tokens: Sequence[int], rows: int, use: Callable[[torch.Tensor], T]
    ) -> tuple[T, PassTiming]:
        """Keep `base_length` tokens, append `tokens`, feed what is not cached.

        Args:
            base_length: Tokens of the sequence to keep.
            tokens: The ones that follow.
            rows: Logits are wanted after each of the last `rows` tokens.
            use: What to make of the logits, [rows, vocab] in the model's dtype, on the engine's thread.

        Raises:
            InvalidFieldError: A token id or a length that cannot be; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
            CapacityError: The device has no memory left for the pass.
            SessionClosedError: The session was closed before its turn came.
        """
        results: list[T] = []

        def step(logits: torch.Tensor) -> None:
            results.append(use(logits))

        work = self._work(base_length, tokens, rows, step)
        self._engine.submit(work)
        try:
            await work.done
        finally:
            work.cancelled = True
        return results[0], work.timing

    async def generate(
        self,
        base_length: int,
        tokens: Sequence[int],
        count: int,
        draw: Callable[[torch.Tensor], tuple[T, int | None]],
        given: Given | None = None,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[tuple[T, PassTiming], None]:
        """Keep `base_length` tokens, append `tokens`, then draw tokens one by one, each fed in the pass after.

        The next pass does not wait for the consumer; when the generator is closed, no more is drawn. What was drawn is
        part of the sequence, the last token too, which is not fed.

        Args:
            base_length: Tokens of the sequence to keep.
            tokens: The ones that follow.
            count: Most tokens to draw.
            draw: Makes of the logits [1, vocab] an item to yield, and the token to append; None is none, and no more
                is drawn. On the engine's thread.
            given: The target's states that a draft lacks; it has them once the first logits are drawn from.
            goes_on: Asked after each token: whether another is drawn. On the engine's thread.

        Raises:
            As `evaluate`.
            MissingStatesError: There are tokens before which no state is known, so nothing is drawn; the tokens are
                taken in.
        """
        items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def step(logits: torch.Tensor) -> int | None:
            item, token = draw(logits)
            if not goes_on():
                work.end()
            loop.call_soon_threadsafe(items.put_nowait, (item,))
            return token

        work = self._work(base_length, tokens, 1, step, count, given)
        self._engine.submit(work)
        work.done.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item[0], work.timing
            await work.done
        finally:
            work.cancelled = True
            if not work.done.cancel() and not work.done.cancelled():
                # Looked at, so that asyncio does not tell of a failure that nobody waits for any more.
                work.done.exception()

    def note(self, base_length: int, tokens: Sequence[int]) -> None:
        """Keep `base_length` tokens, append `tokens`, before whatever is asked next; nothing is fed for it.

        Where `base_length` is past the end of the sequence nothing changes, and what is asked next will be told.

        Raises:
            InvalidFieldError: A token id or a length that cannot be; nothing has changed.
            SessionClosedError: The session was closed.
        """
        work = self._work(base_length, tokens, 1, lambda _: None)
        work.cancelled = True
        work.done.cancel()
        self._engine.submit(work)

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features that are kept of a position."""
        return self._engine.features.token_bytes if self._engine.features is not None else 0

    def features(self, start: int) -> bytes | None:
        """Return the features of the cached positions from `start` on, as `FeaturePool.read`; None where none are kept.

        On the engine's thread.
        """
        pool, lease = self._engine.features, self.lease
        if pool is None or lease is None:
            return None
        return pool.read(lease.start + start, lease.start + lease.cached)

    def distrust(self, bad_rows: int = 1) -> None:
        """Forget what is cached, so that the next request feeds it again and no other session is given any of it.

        On the engine's thread.

        Args:
            bad_rows: How many rows of logits were not finite.
        """
        self._engine.counters.bad_rows += bad_rows
        self._engine.forget(self)

    def close(self) -> None:
        """Give the places back; requests that wait for their turn will not run. May be called again."""
        self._engine.end(self)

    def _work(
        self,
        base_length: int,
        tokens: Sequence[int],
        rows: int,
        step: Callable[[torch.Tensor], int | None],
        steps: int = 1,
        given: Given | None = None,
    ) -> Work:
        limit = self._engine.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < limit):
            at = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
            raise InvalidFieldError(f"tokens[{at}]", tokens[at], f"0 to {limit - 1}, the ids of the vocabulary")
        if (total := base_length + len(tokens)) > self.capacity:
            raise InvalidFieldError(
                "base_length + tokens", total, f"at most {self.capacity}, what the session reserved"
            )
        return Work(self, base_length, tokens, rows, step, steps, given)
