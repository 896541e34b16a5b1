"""A worker's copy of a sequence, and how much of it is in its KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.specdec.errors import UnknownPrefixError


class CachedSequence:
    """The tokens of one session and the length of the prefix whose keys and values are cached.

    The coordinator owns the text; this is a cache of it. Every request says where it starts, so a request may be
    repeated and has the same answer.

    Attributes:
        tokens: All tokens that the worker knows, its own drafts among them.
        cached: How many of them, from the start, have been through the model; the KV cache holds exactly these.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached = 0

    def rebase(self, base_length: int, tokens: Sequence[int]) -> None:
        """Keep `base_length` tokens, forget the rest, append `tokens`.

        Raises:
            UnknownPrefixError: `base_length` is past the end; nothing has changed.
        """
        if base_length > len(self.tokens):
            raise UnknownPrefixError(len(self.tokens))
        del self.tokens[base_length:]
        self.cached = min(self.cached, base_length)
        self.tokens.extend(tokens)

    def pending(self, at_least: int = 1) -> list[int]:
        """Return the tokens that have to be fed next: all that are not cached, and no fewer than the last `at_least`.

        Cropping the cache to `cached` before feeding them is the caller's part; `cached` is lowered here where the last
        `at_least` tokens reach into it.
        """
        self.cached = max(0, min(self.cached, len(self.tokens) - at_least))
        return self.tokens[self.cached :]
