"""The target's hidden states on their way to a draft that is fed with them.

With n tokens committed the draft needs the states at positions 0..n-2: those that the target has computed. Verify asks
for the ones that the draft lacks, where the next round may want drafts, and the next Propose takes them along. A draft
that has none yet is given those of its window, and a round without them is a round without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.v1 import worker_pb2
from services.common.specdec.types import MAX_FEATURE_BYTES, MAX_GAMMA


def is_fed(draft: worker_pb2.ModelInfo, kept: worker_pb2.FeatureSpec) -> bool:
    """Return whether a draft is fed with just the hidden states that a target keeps."""
    needed = draft.features
    return needed.width > 0 and (needed.layers, needed.width) == (kept.layers, kept.width)


class FeatureRelay:
    """What has come of them and is not with the draft yet.

    Attributes:
        known_end: One past the last position whose features the draft has; None where it has none.
    """

    def __init__(
        self,
        info: Callable[[], worker_pb2.ModelInfo | None],
        kept: worker_pb2.FeatureSpec,
        most_bytes: int = MAX_FEATURE_BYTES,
    ) -> None:
        """Hold nothing yet.

        Args:
            info: Tells which draft fits the target that new requests get, None while none does.
            kept: The states of this request's target, which may be an older one.
            most_bytes: Of states in a message.
        """
        self.known_end: int | None = None
        self._info = info
        self._kept = kept
        self._most_bytes = most_bytes
        self._start = 0
        self._data = bytearray()

    def ask_from(self, committed: int) -> int | None:
        """Return from which position on the target has to tell its states; None where no draft is fed with them.

        Args:
            committed: Tokens of the text.
        """
        window = self._window()
        if window is None:
            return None
        end = self._cut(committed)
        # What lies further back is of no use to it. One that is asked for nothing takes none: it would pile up.
        oldest = max(0, committed - window)
        if (useless := min(end, oldest) - self._start) > 0:
            del self._data[: useless * self._row_bytes]
            self._start += useless
        first = oldest if self.known_end is None else max(oldest, self.known_end)
        return end if self._start <= first <= end else first

    def put(self, features: worker_pb2.Features) -> None:
        """Take what the target has told, drafts that may yet be rejected included."""
        row = self._row_bytes
        if self._window() is None or len(features.data) % row:
            return
        if features.start != self._start + len(self._data) // row:
            self._start, self._data = features.start, bytearray()
        self._data += features.data

    def take(self, committed: int) -> worker_pb2.Features | None:
        """Return what the draft lacks, which it then has; None where there is nothing, or where it has a gap before it.

        Args:
            committed: Tokens of the text that the draft is asked to go on from.
        """
        window = self._window()
        if window is None:
            return None
        end = self._cut(committed)
        first = self._start if self.known_end is None else max(self._start, self.known_end)
        has_gap = first != self.known_end and first > max(0, committed - window)
        if first >= end or has_gap:
            return None
        told = bytes(self._data[(first - self._start) * self._row_bytes :])
        self._start, self._data = end, bytearray()
        self.known_end = end
        return worker_pb2.Features(start=first, data=told)

    @property
    def _row_bytes(self) -> int:
        return 2 * self._kept.width

    def _window(self) -> int | None:
        """Return how far the draft looks back; None where none is fed with what the target keeps."""
        info = self._info()
        if info is None or not is_fed(info, self._kept):
            return None
        # No further than a message reaches, whatever the draft says: the target would refuse to answer.
        return min(info.features.window, max(0, self._most_bytes // self._row_bytes - MAX_GAMMA - 1))

    def _cut(self, committed: int) -> int:
        """Forget the states at and after the last token: those tokens were drafts; return where the rest ends."""
        row = self._row_bytes
        end = min(self._start + len(self._data) // row, max(self._start, committed - 1))
        del self._data[(end - self._start) * row :]
        return end
