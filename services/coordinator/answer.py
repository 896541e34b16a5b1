"""The answer as it grows: where it stops, and which of its text is decided.

Tokens are tested one by one for eos, stop token ids, stop strings, then length; nothing after the first hit exists.
Text that may begin a stop string is held back until it is decided, across rounds too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from services.common.specdec.types import Origin


class Finish(enum.Enum):
    """Why an answer ends."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class StopRules:
    """When an answer ends.

    Attributes:
        eos_ids: The model's end-of-sequence tokens; empty where they are to be ignored.
        token_ids: Stop tokens.
        strings: Stop strings, none of them empty.
    """

    eos_ids: frozenset[int] = frozenset()
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of the answer and the text that it adds."""

    token: int
    origin: Origin
    text: str


class Answer:
    """The tokens of one answer, their text, and its end.

    Attributes:
        count: Tokens so far.
        finish: Why the answer has ended, or None.
        stop_string: The stop string that ended it, or empty.
    """

    def __init__(self, rules: StopRules, max_tokens: int, decode: Callable[[int], str]) -> None:
        """Begin an answer.

        Args:
            rules: When it ends.
            max_tokens: When it ends at the latest.
            decode: Feeds the next token to an incremental decoder and returns the characters that it completes.
        """
        self._rules = rules
        self._max_tokens = max_tokens
        self._decode = decode
        self.count = 0
        self.finish: Finish | None = None
        self.stop_string = ""
        self._held: list[Piece] = []
        self._ready: list[Piece] = []

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self._max_tokens - self.count

    def push(self, token: int, origin: Origin) -> Finish | None:
        """Add a token and return why the answer ends with it, or None."""
        self.count += 1
        if token in self._rules.eos_ids or token in self._rules.token_ids:
            self._held.append(Piece(token, origin, ""))
            self.finish = Finish.EOS if token in self._rules.eos_ids else Finish.STOP
        else:
            self._held.append(Piece(token, origin, self._decode(token)))
            self._cut_at_stop_string()
            if self.finish is None and self.room == 0:
                self.finish = Finish.LENGTH
        self._release()
        return self.finish

    def take(self) -> list[Piece]:
        """Return the pieces that have been decided since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def _cut_at_stop_string(self) -> None:
        if not self._rules.strings:
            return
        held = "".join(piece.text for piece in self._held)
        found = [(at, s) for s in self._rules.strings if (at := held.find(s)) >= 0]
        if not found:
            return
        # The earliest start; of those that start together the longest, whatever their order in the request.
        at, self.stop_string = min(found, key=lambda hit: (hit[0], -len(hit[1])))
        self.finish = Finish.STOP
        kept: list[Piece] = []
        for piece in self._held:
            kept.append(Piece(piece.token, piece.origin, piece.text[:at]))
            at = max(0, at - len(piece.text))
        self._held = kept

    def _release(self) -> None:
        """Move what is decided from held to ready, whole tokens at a time."""
        if self.finish is not None or not self._rules.strings:
            self._ready += self._held
            self._held = []
            return
        held = "".join(piece.text for piece in self._held)
        open_length = max(_overlap(held, s) for s in self._rules.strings)
        decided = len(held) - open_length
        while self._held and len(self._held[0].text) <= decided:
            piece = self._held.pop(0)
            decided -= len(piece.text)
            self._ready.append(piece)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
