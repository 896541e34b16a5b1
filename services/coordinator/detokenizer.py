"""Tokens to text as they come: whole characters only."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Final

import tokenizers

_HALF: Final = "\ufffd"
# A character is at most four bytes: three that do not decode may be its beginning, one more before them is not.
_MOST_UNDECIDED: Final = 3
_CONTEXT_TOKENS: Final = 8


class Detokenizer:
    """Decodes one answer token by token.

    Each step decodes the tokens that are not decided yet after the last ones that were (`before`), as alone some
    tokenizers drop a leading space. Both begin and end with a character, since in some tokenizers one incomplete
    character spoils the bytes around it.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, silent: Collection[int], context: Sequence[int]) -> None:
        """Begin an answer.

        Args:
            tokenizer: The target's.
            silent: Its special tokens, which have no text.
            context: The prompt.
        """
        self._tokenizer = tokenizer
        self._silent = silent
        self._before: list[int] = []
        self._before_text = ""
        self._open: list[int] = []
        self._given = 0
        spoken = (token for token in reversed(context) if token not in silent)
        last = list(itertools.islice(spoken, _CONTEXT_TOKENS))[::-1]
        for token in last[self._first_character(last) :]:
            self.push(token)

    def push(self, token: int) -> str:
        """Return the characters that are complete with `token`; none if it only begins one or is special."""
        if token in self._silent:
            return ""
        self._open.append(token)
        text = self._decode(self._before + self._open)
        if not text.startswith(self._before_text):
            if text.endswith(_HALF) and len(self._open) <= _MOST_UNDECIDED:
                return ""
            # No character comes of these bytes: they are invalid, and what was given before them stays given.
            self._close([])
            text = self._decode(self._open)
        start = len(self._before_text) + self._given
        undecided = _undecided(text)
        if undecided and len(self._open) > _MOST_UNDECIDED:
            return text[start : len(text) - self._shorten(undecided)]
        new = text[start : len(text) - undecided]
        if undecided:
            self._given += len(new)
        else:
            if new or not self._before:
                self._close(self._open)
            self._open = []
        return new

    def _first_character(self, tokens: list[int]) -> int:
        """Return the first token that does not begin in the middle of a character; 0 if that cannot be told."""
        for start in range(len(tokens)):
            ends = range(start + 1, start + _MOST_UNDECIDED + 2)
            if not all(self._decode(tokens[start:end]).startswith(_HALF) for end in ends):
                return start
        return 0

    def _shorten(self, undecided: int) -> int:
        """Keep only the tokens that a character may still begin in; return how many characters are undecided."""
        last = self._open[-_MOST_UNDECIDED:]
        text = self._decode(last)
        undecided = min(undecided, _undecided(text))
        if undecided:
            self._close([])
            self._open, self._given = last, len(text) - undecided
        else:
            self._close(last)
            self._open = []
        return undecided

    def _close(self, tokens: list[int]) -> None:
        """Make `tokens` those that the next ones are decoded after."""
        self._before, self._before_text, self._given = tokens, self._decode(tokens), 0

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _undecided(text: str) -> int:
    """Return how many characters at the end may become others with the next token."""
    return min(_MOST_UNDECIDED, len(text) - len(text.rstrip(_HALF)))
