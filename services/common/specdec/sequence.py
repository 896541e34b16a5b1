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


class RemoteSequence:
    """What the coordinator knows of a worker's copy: how much of it is still the beginning of the text.

    Tokens that were committed stay so, and only what came after them has to be compared.
    """

    def __init__(self) -> None:
        self._committed = 0
        self._speculated: list[int] = []

    def plan(
        self, committed: Sequence[int], drafts: Sequence[int] = (), feed_at_least: int = 1
    ) -> tuple[int, list[int]]:
        """Return the `base_length` and `tokens` that bring the worker's copy to `committed` + `drafts`.

        Args:
            committed: The text.
            drafts: What the worker is to have after it.
            feed_at_least: How many tokens have to be sent, known or not.
        """
        known = self._committed
        for theirs, ours in zip(self._speculated, [*committed[known:], *drafts], strict=False):
            if theirs != ours:
                break
            known += 1
        known = min(known, len(committed) + len(drafts) - feed_at_least)
        self._committed = len(committed)
        self._speculated = list(drafts)
        return known, [*committed[known:], *drafts[max(0, known - len(committed)) :]]

    def append(self, token: int) -> None:
        """Note a token that the worker has drafted itself."""
        self._speculated.append(token)

    def forget(self, known_length: int) -> None:
        """Note that the worker knows only this many tokens."""
        self._committed = min(self._committed, known_length)
        self._speculated = []
