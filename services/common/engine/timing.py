"""What a worker spent on one request."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PassTiming:
    """The worker's own clock, so that the caller can tell compute from wire.

    Attributes:
        queue_s: From the request to the start of its first forward pass.
        forward_s: In forward passes and what the device does after them (processors, softmax).
        forward_tokens: Positions that were fed to the model.
        batch_size: Sessions in the largest pass that this request shared.
        reused_tokens: Positions of the prompt that were taken from another session's cache.
    """

    queue_s: float = 0.0
    forward_s: float = 0.0
    forward_tokens: int = 0
    batch_size: int = 0
    reused_tokens: int = 0

    def then(self, queue_s: float, forward_s: float, forward_tokens: int) -> PassTiming:
        """Return the timing with one more pass in it; only the first pass of a request has a queue before it."""
        queue_s = self.queue_s if self.forward_tokens else queue_s
        return replace(
            self,
            queue_s=queue_s,
            forward_s=self.forward_s + forward_s,
            forward_tokens=self.forward_tokens + forward_tokens,
        )
