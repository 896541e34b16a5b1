"""What a target is asked for, as often as it takes to get an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.v1 import target_pb2
from services.common.rpc.codec import encode_support
from services.common.specdec.partial import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """The rows of one round, or one of them again.

    Attributes:
        round_index: Echoed in the reply.
        committed: The text.
        drafts: What follows it.
        supports: For each row that is asked for the ids where the q that tests it is not 0; None for whole rows.
        head: Most entries of a row besides.
        fetch: Which row alone; None for all.
        features_from: From which position on hidden states are asked for too; None asks for none.
    """

    round_index: int
    committed: Sequence[int]
    drafts: Sequence[int]
    supports: Sequence[Ids] | None
    head: int
    fetch: int | None = None
    features_from: int | None = None

    @property
    def returned(self) -> int:
        """How many rows are asked for."""
        return len(self.drafts) + 1 if self.fetch is None else 1

    def again(self, index: int, support: Ids | None) -> Question:
        """Return the question for one of the rows, over another support or whole."""
        supports = None if support is None else [support]
        return dataclasses.replace(self, fetch=index, supports=supports, features_from=None)

    def message(self) -> target_pb2.VerifyRequest:
        """Return the message, without the tokens: which of them a worker lacks depends on the worker."""
        return target_pb2.VerifyRequest(
            round=self.round_index,
            rows=len(self.drafts) + 1,
            supports=[encode_support(ids) for ids in self.supports or ()],
            head=self.head,
            fetch=self.fetch,
            features_from=self.features_from,
        )
