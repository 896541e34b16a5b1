"""Metrics of whole requests, by the names that OpenTelemetry's conventions for generative AI give them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from opentelemetry.metrics import Meter

from services.common.rpc.errors import status_of
from services.common.rpc.tally import Tally

_SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600]
_TOKEN_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5]


class RequestMetrics:
    """Counts and times requests.

    Attributes:
        running: Being served; to be added to and taken from.
        waiting: Being served without a token yet.
        ended: By status.
        prompt_tokens: Of requests that have had a token.
    """

    def __init__(self, meter: Meter) -> None:
        up_down, counter = meter.create_observable_up_down_counter, meter.create_observable_counter
        self.running = Tally(up_down, "paceline.requests.running", "{request}", "Requests being served.")
        self.waiting = Tally(
            up_down,
            "paceline.requests.waiting",
            "{request}",
            "Of these the ones without a token yet: they wait for room at a target, or for their prompt to be read.",
        )
        self.ended = Tally(
            *(counter, "paceline.requests.ended", "{request}", "Requests that have ended, by gRPC status."),
            ("status",),
            [("OK",), ("RESOURCE_EXHAUSTED",), ("UNAVAILABLE",), ("INTERNAL",)],
        )
        self.prompt_tokens = Tally(
            counter, "paceline.tokens.prompt", "{token}", "Tokens of the prompts that were answered."
        )
        self.duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time of a request, refused ones too.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.each_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time of an answer's tokens after the first.",
            explicit_bucket_boundaries_advisory=_TOKEN_SECONDS,
        )

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestClock]:
        """Count and time a request, however it ends."""
        clock = RequestClock(self)
        status = "OK"
        try:
            yield clock
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except Exception as error:
            status = status_of(error).name
            raise
        finally:
            clock.end(status)


class RequestClock:
    """One request, from its arrival on."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._prompt_tokens = self._tokens = 0
        self._of: dict[str, str] = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "paceline"}
        metrics.waiting.add(1)

    def planned(self, *, is_chat: bool, prompt_tokens: int, model: str) -> None:
        """Note what the request is; again where it is planned again."""
        self._prompt_tokens = prompt_tokens
        self._of["gen_ai.response.model"] = model
        if is_chat:
            self._of["gen_ai.operation.name"] = "chat"

    def emitted(self, tokens: int) -> None:
        """Note that a round has decided tokens."""
        self._tokens += tokens
        if self._first_s is None:
            self._first_s = time.perf_counter()
            # Where several tokens came at once they are one step.
            self._tokens = 1
            self._metrics.waiting.add(-1)
            self._metrics.prompt_tokens.add(self._prompt_tokens)
            self._metrics.first_token.record(self._first_s - self._began_s, self._of)

    def end(self, status: str) -> None:
        """Note how it ended: the name of a gRPC status."""
        now_s = time.perf_counter()
        failed = {} if status == "OK" else {"error.type": status}
        self._metrics.ended.add(1, status)
        self._metrics.duration.record(now_s - self._began_s, {**self._of, **failed})
        if self._first_s is None:
            self._metrics.waiting.add(-1)
        elif self._tokens > 1:
            self._metrics.each_token.record((now_s - self._first_s) / (self._tokens - 1), self._of)
