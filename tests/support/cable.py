"""A network cable in this process: what is sent into one of two interfaces comes out of the other, late or never."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time

DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LARGEST = 65_536
_IDLE_S = 0.05


class Cable:
    """Carries frames between two interfaces as long as it is not closed; both are gone then.

    The kernel's own netem does this better, where the kernel has it.

    Attributes:
        delay_s: Of every frame.
        loss: Share of the frames that are lost.
        is_cut: All of them are.
    """

    def __init__(self, one: str, other: str) -> None:
        """Make two interfaces, by their names, and begin to carry."""
        self.delay_s = 0.0
        self.loss = 0.0
        self.is_cut = False
        self._ends = (_interface(one), _interface(other))
        # Of the same for every run, as far as the frames are.
        self._random = random.Random(1)
        self._open = True
        self._thread = threading.Thread(target=self._carry, name=f"cable {one}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the cable away, and its interfaces with it."""
        self._open = False
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        opposite = dict(zip(self._ends, reversed(self._ends), strict=True))
        waiting: list[tuple[float, int, int, bytes]] = []
        count = 0
        while self._open:
            wait_s = min(_IDLE_S, max(0.0, waiting[0][0] - time.monotonic())) if waiting else _IDLE_S
            for end in select.select(self._ends, (), (), wait_s)[0]:
                # An interface that is down has nothing to read and takes nothing.
                with contextlib.suppress(OSError):
                    frame = os.read(end, _LARGEST)
                    if not self.is_cut and self._random.random() >= self.loss:
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + self.delay_s, count, opposite[end], frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):
                    os.write(end, frame)


def _interface(name: str) -> int:
    end = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return end
