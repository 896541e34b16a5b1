"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done since it began.

    Attributes:
        passes: Forward passes.
        positions: Positions fed, over all sessions.
        shares: Sessions served, summed over the passes; over `passes` this is the mean batch size.
        prefix_hits: Sessions that began with a prefix from another's cache.
        reused_tokens: Positions that they did not have to feed.
        pass_s: Time in passes.
        bad_rows: Rows of logits that were not finite.
    """

    passes: int = 0
    positions: int = 0
    shares: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    pass_s: float = 0.0
    bad_rows: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounters):
    """The counters, and how things stand now.

    Attributes:
        sessions_open: Sessions that hold a part of the KV cache.
        sessions_waiting: Sessions that wait for one.
        sessions_limit: Most that may be open.
        requests_queued: Requests that wait for a pass, or are in one.
        kv_reserved: Tokens that sessions may grow to.
        kv_kept: Tokens of prefixes kept for sessions to come.
        kv_size: Tokens in all.
    """

    sessions_open: int
    sessions_waiting: int
    sessions_limit: int
    requests_queued: int
    kv_reserved: int
    kv_kept: int
    kv_size: int
