"""Bearer tokens: a file of those that are good.

# A line each, with a name for people in front or without.
chat: 0b1f6c1e9c6f4bd2a1c0
7c0d5f6be2a94d3f8a55
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from services.common.rpc.reloaded import LOOK_EVERY_S, Reloaded, UnusableFilesError

LEAST_LENGTH = 16
"""Characters of a token: 64 bits where each is a hexadecimal digit."""

# What RFC 6750 lets a token be made of.
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{LEAST_LENGTH},}}=*")


class Tokens:
    """The tokens of a file, which is read anew when it changes. Only their digests are kept."""

    def __init__(self, path: str, look_every_s: float = LOOK_EVERY_S) -> None:
        """Read the file.

        Raises:
            StartupError: It cannot be read, has no token in it, or has a line that is none.
        """
        self._path = path
        self._known = Reloaded([path], self._make, look_every_s)

    def accept(self, token: str) -> bool:
        """Return whether a token is one of them, in a time that does not tell which, or how much of it is right."""
        given = _digest(token)
        found = [hmac.compare_digest(given, known) for known in self._known.current()]
        return any(found)

    def _make(self, contents: Sequence[bytes]) -> list[bytes]:
        tokens = []
        # Never decoded by what it may say: what is wrong is told by the number of its line alone.
        for number, line in enumerate(contents[0].decode("utf-8", "replace").splitlines(), start=1):
            if not (said := line.strip()) or said.startswith("#"):
                continue
            token = said.rpartition(":")[2].strip()
            if fault := fault_of(token):
                raise UnusableFilesError(f"--tokens {self._path}: line {number}: {fault}")
            tokens.append(_digest(token))
        if not tokens:
            raise UnusableFilesError(f"--tokens {self._path}: there is no token in it")
        return tokens


def fault_of(token: str) -> str | None:
    """Return why this can be no token, in words that do not have it; None where it can be one."""
    if _TOKEN.fullmatch(token):
        return None
    return f"no token: must be {LEAST_LENGTH} characters or more, of letters, digits and ._~+/- with = at the end only"


def _digest(token: str) -> bytes:
    # All of one length, whatever is given.
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
