"""Spans of a request's rounds, and the metrics with them.

The tree: CoordinatorService/Generate, then `paceline.round`, then `paceline.propose`, `paceline.verify` and
`paceline.accept`. The workers continue propose and verify from the message's trace fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from services.common.specdec.types import Origin
from services.coordinator.instruments import Instruments
from services.coordinator.types import Round

tracer = trace.get_tracer("paceline.coordinator")


@contextlib.contextmanager
def _child(name: str, parent: Span, attributes: Mapping[str, int] | None) -> Iterator[Span]:
    span = tracer.start_span(name, trace.set_span_in_context(parent), attributes=attributes)
    try:
        yield span
    except Exception as error:
        span.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        span.end()


class RequestObserver:
    """An `Observer`: the spans of one request, and the metrics of all."""

    def __init__(
        self, request_span: Span, instruments: Instruments, alone_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """Observe a request.

        Args:
            request_span: The parent of its rounds' spans.
            instruments: Count its rounds.
            alone_s: Tells what a round without drafts would take now; None where that is not known.
        """
        self._request_span = request_span
        self._instruments = instruments
        self._alone_s = alone_s

    def round(self, index: int, gamma: int, context_length: int) -> AbstractContextManager[Span]:
        """Open the span of a round."""
        attributes = {
            "paceline.round.index": index,
            "paceline.gamma": gamma,
            "paceline.context.length": context_length,
        }
        return self._open("paceline.round", self._request_span, attributes)

    def phase(self, name: str, parent: Span, index: int | None = None) -> AbstractContextManager[Span]:
        """Open the span of a part of a round; `index` where that is not the round's own."""
        return self._open(name, parent, None if index is None else {"paceline.round.index": index})

    def _open(
        self, name: str, parent: Span, attributes: Mapping[str, int] | None = None
    ) -> AbstractContextManager[Span]:
        # A request that is not sampled needs no spans, only its context for the workers' messages.
        if not parent.is_recording():
            return contextlib.nullcontext(parent)
        return _child(name, parent, attributes)

    def finish_round(self, span: Span, done: Round) -> None:
        """Note what a round did, just before its span ends."""
        self._instruments.count_round(done, self._alone_s())
        if not span.is_recording():
            return
        decision = done.decision
        span.set_attributes(
            {
                "paceline.tokens.proposed": done.proposed,
                "paceline.tokens.accepted": decision.accepted,
                "paceline.tokens.emitted": len(done.tokens),
                "paceline.bonus": decision.origin is Origin.BONUS,
                "paceline.payload.q_bytes": done.draft.row_bytes,
                "paceline.payload.p_bytes": done.target.row_bytes + sum(done.fetched),
                "paceline.rows.fetched": len(done.fetched),
                "paceline.degraded": done.degraded,
            }
        )
        for which, call in (("draft", done.draft), ("target", done.target)):
            if call.worker:
                span.set_attribute(f"paceline.{which}.model", call.model)
                span.set_attribute(f"paceline.{which}.worker", call.worker)
        if done.ran_ahead:
            span.set_attribute("paceline.ran_ahead", True)
        if decision.origin is Origin.RESIDUAL:
            span.set_attribute("paceline.rejection.position", decision.accepted)
