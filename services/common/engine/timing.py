"""What a worker spent on one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassTiming:
    """The worker's own clock, so that the caller can tell compute from wire.

    Attributes:
        queue_s: From the request to the start of its first forward pass.
        forward_s: In forward passes and what the device does after them (processors, softmax).
        forward_tokens: Positions that were fed to the model for this request.
        batch_size: Sessions in the largest pass that it shared.
        reused_tokens: Positions of its prompt that were copied from another session's cache.
        pass_tokens: Positions in that largest pass, those of all its sessions together.
    """

    queue_s: float = 0.0
    forward_s: float = 0.0
    forward_tokens: int = 0
    batch_size: int = 0
    reused_tokens: int = 0
    pass_tokens: int = 0
