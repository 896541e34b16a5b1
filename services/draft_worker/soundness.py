"""Whether a draft's logits are finite, told when that changes and not once a round."""

from __future__ import annotations

import logging
from typing import Final

_log = logging.getLogger(__name__)

# So many good rows in a row make a draft sound again. Sessions share it: beside one whose text is too much for the
# model others have finite rows all the time, which is no change of state.
_GOOD_AGAIN: Final = 1_000


class Soundness:
    """A drafter's, over all of its sessions. For the engine's thread alone.

    Attributes:
        bad: Rows that were not finite, since it was last sound.
    """

    def __init__(self) -> None:
        self.bad = 0
        self._good = 0

    def judge(self, is_bad: bool, length: int) -> None:
        """Note a row of logits.

        Args:
            is_bad: It is not finite, so nothing is drafted from it.
            length: Tokens of the text that it follows.
        """
        if is_bad:
            if not self.bad:
                _log.warning("the draft's logits are not finite after %d tokens: nothing is drafted there", length)
            self.bad += 1
            self._good = 0
        elif self.bad:
            self._good += 1
            if self._good >= _GOOD_AGAIN:
                _log.info("the draft's logits are finite again, %d rows were not", self.bad)
                self.bad = self._good = 0
