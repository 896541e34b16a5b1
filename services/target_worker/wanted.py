"""What a request wants of its rows, and the rows as it wants them: whole, or no more of them than the rule needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.v1 import distribution_pb2, target_pb2
from services.common.rpc.codec import decode_support, encode_row
from services.common.specdec.errors import InvalidFieldError
from services.common.specdec.partial import AnyRow, Ids, narrowed, partial_bytes
from services.common.specdec.types import Row
from services.target_worker.verifier import Choice

# A hop to a thread and back costs about 0.1 ms.
_INLINE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The form of the rows of one request.

    Attributes:
        supports: For each row that is returned the ids that are wanted; None for whole rows.
        head: Most entries of a row besides.
        position: Of the token that the first row decides: how many tokens come before it.
    """

    supports: Sequence[Ids] | None
    head: int
    position: int

    @classmethod
    def by(cls, request: target_pb2.VerifyRequest, vocab_size: int) -> Wanted:
        """Return what a request wants.

        Raises:
            InvalidFieldError: Too many supports or too few, or one that is no ascending ids of the vocabulary.
        """
        position = request.base_length + len(request.tokens) - request.rows + 1
        returned = request.rows
        if request.HasField("fetch"):
            position, returned = position + request.fetch, 1
        if not request.supports:
            return cls(None, 0, position)
        if len(request.supports) != returned:
            raise InvalidFieldError(
                "supports",
                f"{len(request.supports)} entries",
                f"none, or {returned}: one for each row that is returned",
            )
        supports = [decode_support(f"supports[{i}]", data, vocab_size) for i, data in enumerate(request.supports)]
        return cls(supports, request.head, position)

    async def messages(self, rows: Sequence[Row], choice: Choice | None) -> list[distribution_pb2.Distribution]:
        """Return the rows as messages. Long ones are gone through in a thread: they would hold up the event loop.

        Args:
            rows: As they were computed.
            choice: Chooses from the tail of a row that does not come whole; None for no choice.
        """
        if sum(row.nbytes for row in rows) <= _INLINE_BYTES:
            return self._messages(rows, choice)
        return await asyncio.to_thread(self._messages, rows, choice)

    def _messages(self, rows: Sequence[Row], choice: Choice | None) -> list[distribution_pb2.Distribution]:
        return [encode_row(self._form(i, row, choice)) for i, row in enumerate(rows)]

    def _form(self, index: int, row: Row, choice: Choice | None) -> AnyRow:
        """Return a row in part where that is smaller. A bad one goes out as it is, for the coordinator to see."""
        if self.supports is None:
            return row
        support = self.supports[index]
        head = min(self.head, len(row.weights))
        if partial_bytes(len(support), head) >= row.nbytes or not np.isfinite(row.total):
            return row
        position = self.position + index
        return narrowed(row, support, head, None if choice is None else lambda tail: choice(tail, position))
