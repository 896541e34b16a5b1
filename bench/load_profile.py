"""Where the event loop's time goes: a profile of cProfile, summed by part of the coordinator."""

from __future__ import annotations

import pstats
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first that a file's path contains names its part.
_PARTS = {
    "/grpc/": "gRPC",
    "/asyncio/": "asyncio",
    "/selectors.py": "asyncio",
    "/specdec/sequence.py": "sessions",
    "/specdec/": "rule",
    "/numpy/": "rule",
    "/functools.py": "rule",
    "/rpc/codec.py": "messages",
    "/google/protobuf/": "messages",
    "/rpc/stream.py": "sessions",
    "/coordinator/clients": "sessions",
    "/coordinator/answer.py": "text",
    "/coordinator/detokenizer.py": "text",
    "/coordinator/observe.py": "spans and metrics",
    "/opentelemetry/": "spans and metrics",
    "/rpc/telemetry.py": "spans and metrics",
    "/coordinator/service.py": "Generate",
    "/coordinator/": "rounds",
}
_Place = tuple[str, int, str]
# Calls, calls that are not recursive, own seconds, all seconds, and the same four by caller.
_Entry = tuple[int, int, float, float, Mapping[_Place, tuple[int, int, float, float]]]
_IDLE = "'select.epoll'"


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the event loop's time goes.

    Attributes:
        rows: "dense" or "sparse".
        rounds: Rounds in the profile.
        parts: Share of each part; waiting for messages, and the start of the process, are not in them.
    """

    rows: str
    rounds: int
    parts: Mapping[str, float]


def shares(file: Path, rows: str, rounds: int) -> Shares:
    """Return the shares of a profile file."""
    stats: Any = pstats.Stats(str(file))
    return Shares(rows, rounds, _normalised(_sums(stats.stats)))


def _sums(entries: Mapping[_Place, _Entry]) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for place, (_, _, own_s, _, callers) in entries.items():
        if place[0] != "~":
            sums[_part(place)] += own_s
        elif _IDLE not in place[2]:
            # What is written in C belongs to whoever calls it.
            for caller, (_, _, there_s, _) in callers.items():
                sums[_part(caller)] += there_s
    return sums


def _part(place: _Place) -> str:
    return next((part for piece, part in _PARTS.items() if piece in place[0]), "")


def _normalised(sums: Mapping[str, float]) -> dict[str, float]:
    known = sorted(((part, seconds) for part, seconds in sums.items() if part), key=lambda each: -each[1])
    total = sum(seconds for _, seconds in known)
    return {part: seconds / total for part, seconds in known}
