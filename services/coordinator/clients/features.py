"""The target's hidden states on their way to a draft that is fed with them.

With n tokens committed the draft needs the states at positions 0..n-2: those that the target has computed. Verify asks
for the ones that the draft lacks, the next Propose takes them along. A draft that has none yet is given those of its
window, and a round without them is a round without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.v1 import worker_pb2


class FeatureRelay:
    """What has come of them and is not with the draft yet.

    Attributes:
        known_end: One past the last position whose features the draft has; None where it has none.
    """

    def __init__(self, info: Callable[[], worker_pb2.ModelInfo | None]) -> None:
        """Hold nothing yet.

        Args:
            info: Tells which draft fits the target now, None while none does.
        """
        self.known_end: int | None = None
        self._info = info
        self._start = 0
        self._data = bytearray()

    def ask_from(self, committed: int) -> int | None:
        """Return from which position on the target has to tell its states; None where no draft is fed with them.

        Args:
            committed: Tokens of the text.
        """
        info = self._info()
        if info is None or not info.HasField("features"):
            return None
        end = self._cut(committed, info.features)
        # What lies further back is of no use to it.
        oldest = max(0, committed - info.features.window)
        first = oldest if self.known_end is None else max(oldest, self.known_end)
        return end if self._start <= first <= end else first

    def put(self, features: worker_pb2.Features) -> None:
        """Take what the target has told, drafts that may yet be rejected included."""
        info = self._info()
        row = _row_bytes(info.features) if info is not None else 0
        if not row or len(features.data) % row:
            return
        if features.start != self._start + len(self._data) // row:
            self._start, self._data = features.start, bytearray()
        self._data += features.data

    def take(self, committed: int) -> worker_pb2.Features | None:
        """Return what the draft lacks, which it then has; None where there is nothing, or where it has a gap before it.

        Args:
            committed: Tokens of the text that the draft is asked to go on from.
        """
        info = self._info()
        if info is None or not info.HasField("features"):
            return None
        end = self._cut(committed, info.features)
        first = self._start if self.known_end is None else max(self._start, self.known_end)
        has_gap = first != self.known_end and first > max(0, committed - info.features.window)
        if first >= end or has_gap:
            return None
        told = bytes(self._data[(first - self._start) * _row_bytes(info.features) :])
        self._start, self._data = end, bytearray()
        self.known_end = end
        return worker_pb2.Features(start=first, data=told)

    def _cut(self, committed: int, spec: worker_pb2.FeatureSpec) -> int:
        """Forget the states at and after the last token: those tokens were drafts; return where the rest ends."""
        row = _row_bytes(spec)
        end = min(self._start + len(self._data) // row, max(self._start, committed - 1))
        del self._data[(end - self._start) * row :]
        return end


def _row_bytes(spec: worker_pb2.FeatureSpec) -> int:
    return 2 * spec.width
