"""Counter-based random numbers: a uniform is a pure function of what it decides.

Keyed by round and not by position in the text: a rejected draft's number would come back at the same position, and a
gamma chosen after seeing that draft would bias the next token.
"""

from __future__ import annotations

import enum
import hashlib
import struct


class Purpose(enum.IntEnum):
    """What a uniform decides. No number serves two decisions."""

    DRAFT = 1  # which token the draft samples
    ACCEPT = 2  # whether a draft is kept
    REPLACE = 3  # which token follows the kept drafts: residual, bonus, or the target's own


def uniform(seed: int, round_index: int, offset: int, purpose: Purpose) -> float:
    """Return the uniform in [0, 1) of one decision.

    Args:
        seed: Key of the request, 64 bits.
        round_index: Counts every Propose that the coordinator starts.
        offset: Position in the round, from 0.
        purpose: What is decided.
    """
    key = struct.pack("<QQII", seed, round_index, offset, purpose)
    digest = hashlib.blake2b(key, digest_size=8, person=b"paceline.v1").digest()
    # The top 53 bits fill a float64's mantissa exactly, so 1.0 never comes out.
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)
