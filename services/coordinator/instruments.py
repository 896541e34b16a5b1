"""The coordinator's metrics: names, units, and what counts; docs/operations.md has them as a table.

A share is counted in two parts, so that it can be summed over pods: alpha is `paceline.tokens.accepted` over
`paceline.tokens.tested`. What is counted in every round is a `Tally`; the few histograms cost 6 us a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import grpc
from opentelemetry import metrics
from opentelemetry.metrics import Observation

from services.common.rpc.tally import Tally, observe
from services.common.specdec.types import Origin
from services.coordinator.request_metrics import RequestMetrics
from services.coordinator.types import Call, Round

_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30]
_COUNTS = [float(n) for n in range(17)]
_WORKERS = ("draft", "target")
_PARTS = ("queue", "forward", "other", "wire")
_BAD_ROW = "bad row"
_DEGRADED = ("draft absent", "draft late", "draft lost", "draft out of context", _BAD_ROW)


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
    """The coordinator's metrics.

    Attributes:
        requests: Those of whole requests.
        mismatch: Draft workers that are not used.
    """

    def __init__(self, meter: metrics.Meter | None = None) -> None:
        """Register them.

        Args:
            meter: Where; None for where the environment says.
        """
        self._meter = meter = meter or metrics.get_meter("paceline.coordinator")
        tally = partial(Tally, meter.create_observable_counter)
        workers = [(worker,) for worker in _WORKERS]
        self.requests = RequestMetrics(meter)
        self._duration = meter.create_histogram(
            "paceline.round.duration",
            "s",
            "Time of a round, by phase: draft, verify, accept, total; wire is of both calls, and part of the others.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._accepted_length = meter.create_histogram(
            "paceline.round.accepted_length",
            "{token}",
            "Drafts that a round kept.",
            explicit_bucket_boundaries_advisory=_COUNTS,
        )
        self._rounds = tally("paceline.rounds", "{round}", "Rounds, each of which is a pass of the target.")
        self._degraded = tally(
            *(
                "paceline.rounds.degraded",
                "{round}",
                "Rounds with fewer drafts than there should have been, by reason.",
            ),
            ("reason",),
            [(reason,) for reason in _DEGRADED],
        )
        self._ran_ahead = tally(
            "paceline.rounds.ran_ahead",
            "{round}",
            "Rounds while whose verification drafting went on, by whether the next round had those drafts.",
            ("kept",),
            [(False,), (True,)],
        )
        self._asked = tally("paceline.tokens.asked", "{token}", "Drafts asked for: over rounds the mean gamma.")
        self._proposed = tally("paceline.tokens.proposed", "{token}", "Drafts sent to the target.")
        self._tested = tally("paceline.tokens.tested", "{token}", "Drafts looked at: up to the first rejected one.")
        self._accepted = tally("paceline.tokens.accepted", "{token}", "Drafts kept.")
        self._emitted = tally("paceline.tokens.emitted", "{token}", "Tokens of answers.")
        position = ("position",), [(0,)]
        self._tested_at = tally(
            *("paceline.tokens.tested_per_position", "{token}", "Drafts looked at, by position in the round."),
            *position,
        )
        self._accepted_at = tally(
            *("paceline.tokens.accepted_per_position", "{token}", "Drafts kept, by position in the round."), *position
        )
        self._fetched = tally("paceline.rows.fetched", "{row}", "Rows of p that more was needed of than had come.")
        self._bad_rows = tally(
            *("paceline.rows.bad", "{row}", "Rows reached by a text that are no distribution, by worker."),
            ("worker",),
            workers,
        )
        self._calls = tally("paceline.calls", "{call}", "Answers of workers.", ("worker",), workers)
        self._call_time = tally(
            *("paceline.call.time", "s", "Time of these, by part: queue, forward, other (of the worker), wire."),
            ("worker", "part"),
            [(worker, part) for worker in _WORKERS for part in _PARTS],
        )
        self._payload = tally(
            *("paceline.payload.io", "By", "Messages to and from workers, by direction: sent, received."),
            ("worker", "direction"),
            [(worker, direction) for worker in _WORKERS for direction in ("sent", "received")],
        )
        self._lost = tally(
            *("paceline.workers.lost", "{stream}", "Worker streams that broke, by gRPC status."),
            ("worker", "status"),
            [(worker, "UNAVAILABLE") for worker in _WORKERS],
        )
        self._retries = tally("paceline.verify.retries", "{attempt}", "Verifications tried again, after a loss.")
        self._speculation_time = tally(
            "paceline.speculation.time",
            "s",
            "Of rounds whose gamma adapts: spent, and what their tokens would have taken alone, without drafts.",
            ("of",),
            [("spent",), ("alone",)],
        )
        self.mismatch = meter.create_counter(
            "paceline.draft.mismatch",
            "{check}",
            "Draft workers not used: their tokenizer is not the target's, or they need states that it does not keep.",
        )

    def count_round(self, done: Round, alone_s: float | None = None) -> None:
        """Count what one round did.

        Args:
            done: The round.
            alone_s: What a round without drafts would have taken; None where that is not known.
        """
        decision = done.decision
        self._time(done)
        self._accepted_length.record(decision.accepted)
        self._rounds.add(1)
        self._asked.add(done.gamma)
        self._proposed.add(done.proposed)
        self._tested.add(decision.tested)
        self._accepted.add(decision.accepted)
        self._emitted.add(len(done.tokens))
        self._fetched.add(len(done.fetched))
        for position in range(decision.tested):
            self._tested_at.add(1, position)
        for position in range(decision.accepted):
            self._accepted_at.add(1, position)
        if done.ran_ahead:
            self._ran_ahead.add(1, decision.origin is Origin.ACCEPTED_DRAFT)
        if done.degraded in _DEGRADED:
            self._degraded.add(1, done.degraded)
        elif done.degraded:
            self._degraded.add(1, _BAD_ROW)
            self._bad_rows.add(1, "draft")
        # The first round takes the prompt in, with drafts or without.
        if alone_s is not None and done.index:
            self._speculation_time.add(done.total_s, "spent")
            self._speculation_time.add(len(done.tokens) * alone_s, "alone")

    def _time(self, done: Round) -> None:
        wire_s = 0.0
        for worker, call in (("draft", done.draft), ("target", done.target)):
            # One that did not answer in time has told no time of its own: its wait is no wire.
            if call.service_s:
                wire_s += self._time_call(worker, call)
        for phase, seconds in (
            ("draft", done.draft_wait_s),
            ("verify", done.target.elapsed_s),
            ("accept", done.accept_s),
            ("wire", wire_s),
            ("total", done.total_s),
        ):
            self._duration.record(seconds, {"phase": phase})

    def _time_call(self, worker: str, call: Call) -> float:
        """Count a call by its parts; return the wire's."""
        wire_s = max(0.0, call.elapsed_s - call.service_s)
        self._calls.add(1, worker)
        self._call_time.add(call.queue_s, worker, "queue")
        self._call_time.add(call.forward_s, worker, "forward")
        self._call_time.add(max(0.0, call.service_s - call.queue_s - call.forward_s), worker, "other")
        self._call_time.add(wire_s, worker, "wire")
        return wire_s

    def count_bad_target_row(self) -> None:
        """Count a row of p that ends its request."""
        self._bad_rows.add(1, "target")

    def count_lost(self, worker: str, status: grpc.StatusCode) -> None:
        """Count a stream that broke."""
        self._lost.add(1, worker, status.name)

    def count_retry(self) -> None:
        """Count an attempt at a verification after the first."""
        self._retries.add(1)

    def count_payload(self, worker: str, direction: str) -> Callable[[int], None]:
        """Return what counts the bytes of messages to (`sent`) or from (`received`) a worker."""
        return lambda size: self._payload.add(size, worker, direction)

    def watch_limit(self, most: int) -> None:
        """Export how many requests are served at once."""
        self._gauge("paceline.requests.limit", "{request}", "Requests served at once.", lambda: [Observation(most)])

    def watch_workers(self, read: Callable[[], Mapping[str, bool]]) -> None:
        """Have it read at every export which workers were found when last asked for."""

        def found() -> list[Observation]:
            return [Observation(int(is_there), {"worker": worker}) for worker, is_there in read().items()]

        self._gauge(
            "paceline.workers.found", "{worker}", "1 where a worker that can be used answers, 0 where none does.", found
        )

    def watch_estimates(self, read: Callable[[], Iterable[Estimate]]) -> None:
        """Have what adaptive gamma goes by read at every export."""

        def alphas() -> list[Observation]:
            return [Observation(estimate.alpha, estimate.of) for estimate in read()]

        def seconds() -> list[Observation]:
            parts = [(e.of, part, value) for e in read() for part, value in e.seconds.items()]
            return [Observation(value, {**of, "part": part}) for of, part, value in parts]

        self._gauge("paceline.speculation.alpha", "1", "Drafts kept over drafts tested, of late.", alphas)
        told = (
            "Of a round at the load of the moment: alone, without drafts; asked, with them but for them; draft, each."
        )
        self._gauge("paceline.speculation.cost", "s", told, seconds)

    def _gauge(self, name: str, unit: str, description: str, read: Callable[[], Iterable[Observation]]) -> None:
        observe(self._meter.create_observable_gauge, name, unit, description, read)
