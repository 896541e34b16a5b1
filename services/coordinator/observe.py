"""Spans and metrics of a request's rounds.

The tree: CoordinatorService/Generate, then `paceline.round`, then `paceline.propose`, `paceline.verify` and
`paceline.accept`. The workers continue propose and verify from the message's trace fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Span, StatusCode

from services.common.specdec.types import Origin
from services.coordinator.types import Round

tracer = trace.get_tracer("paceline.coordinator")
_meter = metrics.get_meter("paceline.coordinator")
_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
_COUNTS = [float(n) for n in range(17)]


class Estimate(NamedTuple):
    """What adaptive gamma goes by.

    Attributes:
        of: Which requests it is of.
        alpha: Drafts kept over drafts tested.
        seconds: What a round takes, by part.
    """

    of: Mapping[str, str | bool | int]
    alpha: float
    seconds: Mapping[str, float]


class Instruments:
    """The coordinator's metrics."""

    def __init__(self) -> None:
        self.round_duration = _meter.create_histogram(
            "paceline.round.duration",
            "s",
            "Time of a round, by phase: draft, verify, accept, total.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.accepted_length = _meter.create_histogram(
            "paceline.round.accepted_length",
            "{token}",
            "Drafts that a round kept.",
            explicit_bucket_boundaries_advisory=_COUNTS,
        )
        self.proposed = _meter.create_counter("paceline.tokens.proposed", "{token}", "Drafts sent to the target.")
        self.accepted = _meter.create_counter("paceline.tokens.accepted", "{token}", "Drafts kept.")
        self.emitted = _meter.create_counter("paceline.tokens.emitted", "{token}", "Tokens of answers.")
        self.fetched = _meter.create_counter(
            "paceline.rows.fetched", "{row}", "Rows of p that more was needed of than had come."
        )
        self.per_position = _meter.create_counter(
            "paceline.tokens.accepted_per_position", "{token}", "Drafts kept, by position in the round."
        )
        self.degraded = _meter.create_counter(
            "paceline.rounds.degraded", "{round}", "Rounds with fewer drafts than there should have been, by reason."
        )
        self.ran_ahead = _meter.create_counter(
            "paceline.rounds.ran_ahead",
            "{round}",
            "Rounds while whose verification drafting went on, by whether the next round had those drafts.",
        )
        self.running = _meter.create_up_down_counter("paceline.requests.running", "{request}", "Requests being served.")
        self.lost = _meter.create_counter("paceline.workers.lost", "{stream}", "Worker streams that broke.")
        self.mismatch = _meter.create_counter(
            "paceline.draft.mismatch",
            "{check}",
            "Draft workers not used: their tokenizer is not the target's, or they need states that it does not keep.",
        )

    def watch_estimates(self, read: Callable[[], Iterable[Estimate]]) -> None:
        """Have what adaptive gamma goes by read at every export."""

        def alphas(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(estimate.alpha, estimate.of) for estimate in read()]

        def seconds(_: CallbackOptions) -> Iterable[Observation]:
            parts = [(e.of, part, value) for e in read() for part, value in e.seconds.items()]
            return [Observation(value, {**of, "part": part}) for of, part, value in parts]

        _meter.create_observable_gauge(
            "paceline.speculation.alpha", [alphas], "1", "Drafts kept over drafts tested, of late."
        )
        _meter.create_observable_gauge(
            "paceline.speculation.cost",
            [seconds],
            "s",
            "Of a round at the load of the moment: alone, without drafts; asked, with them but for them; draft, each.",
        )

    def count_round(self, done: Round) -> None:
        """Count what one round did."""
        for phase, seconds in (
            ("draft", done.draft_wait_s),
            ("verify", done.target.elapsed_s),
            ("accept", done.accept_s),
            ("total", done.total_s),
        ):
            self.round_duration.record(seconds, {"phase": phase})
        accepted = done.decision.accepted
        self.accepted_length.record(accepted)
        self.proposed.add(done.proposed)
        self.accepted.add(accepted)
        self.emitted.add(len(done.tokens))
        self.fetched.add(len(done.fetched))
        for position in range(accepted):
            self.per_position.add(1, {"position": position})
        if done.ran_ahead:
            self.ran_ahead.add(1, {"kept": done.decision.origin is Origin.ACCEPTED_DRAFT})
        if done.degraded:
            self.degraded.add(1, {"reason": done.degraded if done.degraded.startswith("draft") else "bad row"})


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

    def __init__(self, request_span: Span, instruments: Instruments) -> None:
        self._request_span = request_span
        self._instruments = instruments

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
        self._instruments.count_round(done)
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
