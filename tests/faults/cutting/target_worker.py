"""A target worker whose connections are cut a moment after they have reached their age, in mid-text."""

from __future__ import annotations

from typing import Any

from services.common.rpc import server
from services.target_worker.__main__ import main

_GRACE_MS = 100
_plain = server.keepalive_options


def _with_a_grace(keepalive_s: float) -> list[tuple[str, Any]]:
    return [*_plain(keepalive_s), ("grpc.max_connection_age_grace_ms", _GRACE_MS)]


if __name__ == "__main__":
    server.keepalive_options = _with_a_grace
    main()
