"""What the rounds did, as the client is told."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from services.coordinator.types import Call, Round


def speculation_stats(rounds: Sequence[Round]) -> pb.SpeculationStats:
    """Return the sums over a request's rounds, and a row for each."""
    tested = sum(r.decision.tested for r in rounds)
    accepted = sum(r.decision.accepted for r in rounds)
    emitted = sum(len(r.tokens) for r in rounds)
    return pb.SpeculationStats(
        rounds=len(rounds),
        proposed=sum(r.proposed for r in rounds),
        tested=tested,
        accepted=accepted,
        emitted=emitted,
        alpha=accepted / tested if tested else 0.0,
        tokens_per_round=emitted / len(rounds) if rounds else 0.0,
        degraded_rounds=sum(bool(r.degraded) for r in rounds),
        per_round=[_row(r) for r in rounds],
    )


def _row(done: Round) -> pb.RoundStats:
    calls = (done.draft, done.target)
    return pb.RoundStats(
        index=done.index,
        gamma=done.gamma,
        proposed=done.proposed,
        tested=done.decision.tested,
        accepted=done.decision.accepted,
        emitted=len(done.tokens),
        degraded=bool(done.degraded),
        start_ms=done.start_s * 1e3,
        total_ms=done.total_s * 1e3,
        draft_ms=done.draft_wait_s * 1e3,
        verify_ms=done.target.elapsed_s * 1e3,
        accept_ms=done.accept_s * 1e3,
        # A draft that did not answer in time has told no time of its own: its wait is no wire.
        wire_ms=sum(call.elapsed_s - call.service_s for call in calls if call.service_s) * 1e3,
        draft=_timing(done.draft),
        target=_timing(done.target),
        q_bytes=done.draft.row_bytes,
        p_bytes=done.target.row_bytes + sum(done.fetched),
        fetched_rows=len(done.fetched),
        ran_ahead=done.ran_ahead,
    )


def _timing(call: Call) -> worker_pb2.WorkerTiming:
    return worker_pb2.WorkerTiming(
        queue_ms=call.queue_s * 1e3,
        forward_ms=call.forward_s * 1e3,
        service_ms=call.service_s * 1e3,
        forward_tokens=call.forward_tokens,
        worker_id=call.worker,
        batch_size=call.batch_size,
        reused_tokens=call.reused_tokens,
        pass_tokens=call.pass_tokens,
    )
