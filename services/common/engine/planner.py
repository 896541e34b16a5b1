"""From the requests that wait to the next pass: who is still wanted, whose prefix is held already, who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.engine.kv_memory import KvMemory, Lease
from services.common.engine.prefixes import BLOCK
from services.common.engine.runner import Feed
from services.common.engine.scheduler import PassLimits, Share, plan_pass
from services.common.engine.stats import EngineCounters
from services.common.engine.work import MissingStatesError, SessionClosedError, Work
from services.common.specdec.errors import UnknownPrefixError


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass does: copies (source, target, length) of prefixes first, then each share's feed."""

    copies: list[tuple[int, int, int]]
    shares: list[Share[Work]]
    feeds: list[Feed]


class Planner:
    """Plans passes. Used under the engine's lock only: it reads sequences and writes the memory's books."""

    def __init__(self, memory: KvMemory, limits: PassLimits, counters: EngineCounters) -> None:
        self._memory = memory
        self._limits = limits
        self._counters = counters

    def plan(self, waiting: Sequence[Work]) -> Pass | None:
        """Return the next pass; None where none of them can take part in one.

        Args:
            waiting: Requests that are still `wanted`, in the order in which they came.
        """
        copies: list[tuple[int, int, int]] = []
        ready: list[Work] = []
        prefilling: set[Lease] = set()
        for work in waiting:
            if not self._reuse(work, copies, prefilling):
                continue
            ready.append(work)
            if work.pending > work.rows:
                prefilling.add(work.lease)
        if not ready:
            return None
        shares = plan_pass(ready, self._limits)
        # Made here, under the lock: a session that is closed during the pass has its sequence cut off.
        return Pass(copies, shares, [share.work.feed(share.count, share.complete) for share in shares])

    def wanted(self, work: Work) -> bool:
        """Begin a request that has not begun; tell whether it is to be served at all."""
        try:
            if work.begun:
                work.lease  # noqa: B018 - raises when the session has been closed
            else:
                # One that is cancelled too: its owner goes on from the sequence that it asked for.
                work.begin()
                self._memory.publish(work.lease)
        except (SessionClosedError, UnknownPrefixError, MissingStatesError) as error:
            work.finish(error)
            return False
        if work.cancelled:
            work.finish(SessionClosedError())
            return False
        return True

    def _reuse(self, work: Work, copies: list[tuple[int, int, int]], prefilling: set[Lease]) -> bool:
        """Give a prompt at its beginning what others hold of it; return False to let it wait for one that is ahead.

        Several sessions with one long prefix arrive together: the first feeds it, the others wait for that, and copy.
        """
        lease = work.lease
        limit = len(lease.tokens) - work.rows
        if lease.cached or limit < BLOCK:
            return True
        held = self._memory.donor(lease.tokens)
        have = min(held[1], limit) if held is not None and held[0] is not lease else 0
        ahead = self._memory.sharing(lease.tokens, prefilling)
        if any(min(common, limit) >= have + BLOCK for common in ahead.values()):
            return False
        if held is not None and have >= BLOCK:
            copies.append((held[0].start, lease.start, have))
            work.reuse(have)
            self._counters.prefix_hits += 1
            self._counters.reused_tokens += have
        return True
