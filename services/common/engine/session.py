"""One sequence on one model: its tokens, its KV cache, and the passes that extend them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from services.common.engine.executor import PassExecutor
from services.common.engine.kv_cache import KvCache
from services.common.engine.model import LoadedModel
from services.common.engine.processors import distributions
from services.common.engine.timing import PassTiming
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.sequence import CachedSequence
from services.common.specdec.types import SamplingParams

T = TypeVar("T")


class SessionClosedError(Exception):
    """The session was closed before this pass had its turn."""


class ModelSession:
    """A sequence, and the keys and values of its prefix.

    Tokens and cache are touched by the executor's jobs alone, which run one after the other: a request whose caller has
    left may still be in its pass while the session's next request arrives.

    Attributes:
        capacity: Most tokens that can be fed.
        sequence: The tokens, and how many of them are in the KV cache.
        forward_tokens: Positions fed to the model since the session began.
    """

    def __init__(self, loaded: LoadedModel, executor: PassExecutor, capacity: int, prefill_chunk: int) -> None:
        """Reserve the KV cache.

        Args:
            loaded: The model.
            executor: Runs the passes.
            capacity: Most tokens that can be fed, no more than the model's context length.
            prefill_chunk: Most positions fed in one job, so that a long prompt lets others in between.
        """
        self.capacity = capacity
        self.sequence = CachedSequence()
        self.forward_tokens = 0
        self._loaded = loaded
        self._executor = executor
        self._prefill_chunk = prefill_chunk
        self._cache: KvCache | None = KvCache(loaded.config, capacity)

    async def evaluate(
        self, base_length: int, tokens: Sequence[int], rows: int, use: Callable[[torch.Tensor], T]
    ) -> tuple[T, PassTiming]:
        """Keep `base_length` tokens, append `tokens`, feed what is not cached.

        Args:
            base_length: Tokens of the sequence to keep.
            tokens: The ones that follow.
            rows: Logits are wanted after each of the last `rows` tokens.
            use: What to make of the logits, [rows, vocab] in the model's dtype, in the same job.

        Raises:
            InvalidFieldError: A token id or a length that cannot be; nothing has changed.
            UnknownPrefixError: `base_length` is past the end of the sequence; nothing has changed.
            SessionClosedError: The session was closed before its turn came.
        """
        self._check(base_length, tokens)
        timing = PassTiming()
        results: list[T] = []

        def begin() -> int:
            self._open_cache()
            self.sequence.rebase(base_length, tokens)
            return go_on()

        def go_on() -> int:
            pending = self.sequence.pending(rows)
            if len(pending) > max(self._prefill_chunk, rows):
                chunk = pending[: min(self._prefill_chunk, len(pending) - rows)]
                self._feed(chunk, 1)
                return len(chunk)
            results.append(use(self._feed(pending, rows)))
            return len(pending)

        job = begin
        while not results:
            fed, queue_s, run_s = await self._executor.run(job)
            timing = timing.then(queue_s, run_s, fed)
            job = go_on
        return results[0], timing

    def close(self) -> None:
        """Free the KV cache; passes that wait for their turn will not run."""
        self._cache = None

    def _check(self, base_length: int, tokens: Sequence[int]) -> None:
        limit = self._loaded.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < limit):
            at = next(i for i, token in enumerate(tokens) if not 0 <= token < limit)
            raise InvalidFieldError(f"tokens[{at}]", tokens[at], f"0 to {limit - 1}, the ids of the vocabulary")
        if (total := base_length + len(tokens)) > self.capacity:
            raise InvalidFieldError(
                "base_length + tokens", total, f"at most {self.capacity}, what the session reserved"
            )

    def _open_cache(self) -> KvCache:
        if self._cache is None:
            raise SessionClosedError
        return self._cache

    def _feed(self, tokens: list[int], rows: int) -> torch.Tensor:
        """Run one pass over `tokens`; return the logits of the last `rows` of them: [rows, vocab]."""
        cache, known, start = self._open_cache(), self._loaded.forward_arguments, self.sequence.cached
        cache.crop_to(start)
        # transformers renamed past_key_values; models with code of their own may still have the old name.
        arguments: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
        device = self._loaded.device
        if "position_ids" in known:
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
        if "logits_to_keep" in known:
            arguments["logits_to_keep"] = rows
        # No attention mask: nothing is padded, and without one the library takes its fastest path.
        output = self._loaded.model(input_ids=torch.tensor([tokens], device=device), **arguments)
        self.sequence.cached = start + len(tokens)
        self.forward_tokens += len(tokens)
        # Columns past the vocabulary are padding of the weights.
        logits: torch.Tensor = output.logits[0, -rows:, : self._loaded.vocab_size]
        return logits


async def warm_up(loaded: LoadedModel, executor: PassExecutor) -> None:
    """Run passes of one to ten tokens: the first of each size sets up kernels, threads and memory."""
    longest = min(10, loaded.context_length or 10)
    session = ModelSession(loaded, executor, capacity=longest, prefill_chunk=longest)
    for count in range(longest, 0, -1):
        await session.evaluate(0, [0] * count, count, lambda logits: distributions(logits, SamplingParams()))
