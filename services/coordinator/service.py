"""The Generate RPC: decode, run the rounds, encode."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc
from services.common.rpc import telemetry
from services.common.rpc.codec import encode_sampling, encode_verification
from services.common.rpc.errors import Context, RpcError, status_of, statuses
from services.common.specdec.acceptance import BadTargetRowError
from services.common.specdec.types import Origin, VerificationMode
from services.coordinator.admission import Admission
from services.coordinator.answer import Answer, Finish, Piece
from services.coordinator.clients import DraftSession, FeatureRelay, TargetSession, session_start
from services.coordinator.config import CoordinatorSettings
from services.coordinator.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from services.coordinator.heads import RowHeads
from services.coordinator.instruments import Estimate, Instruments
from services.coordinator.loop import Rounds
from services.coordinator.observe import RequestObserver, tracer
from services.coordinator.overlap import FixedOverlap, overlap_policy
from services.coordinator.ports import TargetChangedError, TargetFullError, TargetUnavailableError
from services.coordinator.request import Target, check_request_id, feature_room, plan, whole_rows
from services.coordinator.request_metrics import RequestClock
from services.coordinator.speculation import Speculation
from services.coordinator.stats import speculation_stats
from services.coordinator.types import Plan, Round
from services.coordinator.workers import Workers

log = logging.getLogger(__name__)

SERVICE = "paceline.v1.CoordinatorService"
_METHOD = f"{SERVICE}/Generate"

_ORIGINS = {
    Origin.ACCEPTED_DRAFT: pb.TOKEN_ORIGIN_ACCEPTED_DRAFT,
    Origin.RESIDUAL: pb.TOKEN_ORIGIN_RESIDUAL,
    Origin.BONUS: pb.TOKEN_ORIGIN_BONUS,
    Origin.TARGET: pb.TOKEN_ORIGIN_TARGET,
}
_FINISHES = {
    Finish.EOS: pb.FINISH_REASON_EOS,
    Finish.STOP: pb.FINISH_REASON_STOP,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
}


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves Generate."""

    def __init__(self, settings: CoordinatorSettings, workers: Workers, instruments: Instruments) -> None:
        self._settings = settings
        self._workers = workers
        self._instruments = instruments
        self._heads = RowHeads(settings.row_head) if settings.partial_rows else None
        self._speculation: dict[tuple[bool, VerificationMode, int], Speculation] = {}
        self._admission = Admission(settings.max_requests, instruments)
        self._overlap = overlap_policy(settings.overlap, lambda: self._admission.running)
        instruments.watch_estimates(self._estimates)

    # A coroutine that writes, not a generator that yields: a generator suspended at a yield when the client cancels is
    # closed whenever it is collected, and the workers' sessions would stay open until then.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream the continuation of a prompt; see the proto for the contract."""
        async with statuses(context) as call, self._admission.admitted() as clock:
            call.request_id = check_request_id(request.request_id)
            with _request_span(context, call.request_id, self._settings.client_traces) as span:
                call.enter(telemetry.traceparent(span))
                async with self._deadline(context):
                    await context.send_initial_metadata((("paceline-request-id", call.request_id),))
                    await self._generate(request, call.request_id, span, clock, context)

    async def _generate(
        self, request: pb.GenerateRequest, request_id: str, span: Span, clock: RequestClock, context: Context
    ) -> None:
        while True:
            target = self._workers.target
            if target is None:
                raise RpcError(grpc.StatusCode.UNAVAILABLE, f"no target worker found yet at {self._settings.target}")
            todo = await asyncio.to_thread(plan, request, request_id, target, self._settings)
            model = target.info.identity.model_id
            clock.planned(is_chat=request.HasField("chat"), prompt_tokens=len(todo.prompt), model=model)
            if self._settings.log_content:
                log.info("prompt: %s", list(todo.prompt))
            try:
                await self._answer(todo, target, span, clock, context)
                return
            except TargetChangedError as changed:
                # Nothing has been decided yet: the new target's tokenizer and defaults make it another plan.
                log.info("planned again, the target has changed: %s", changed)

    async def _answer(self, todo: Plan, target: Target, span: Span, clock: RequestClock, context: Context) -> None:
        answer = Answer(todo.stop, todo.max_tokens, target.codec.detokenizer(todo.prompt).push)
        rounds: list[Round] = []
        async with self._rounds(todo, answer, target, span) as running:
            try:
                async for done in running.run():
                    rounds.append(done)
                    clock.emitted(len(done.tokens))
                    if pieces := answer.take():
                        if self._settings.log_content:
                            log.info("answer: %r", "".join(piece.text for piece in pieces))
                        await context.write(pb.GenerateResponse(chunk=_chunk(pieces)))
            except TargetFullError as error:
                full = grpc.StatusCode.RESOURCE_EXHAUSTED
                raise RpcError(full, str(error), retry_after_s=self._admission.retry_after_s()) from error
            except TargetUnavailableError as error:
                raise RpcError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            except BadTargetRowError as error:
                self._instruments.count_bad_target_row()
                told = f"the target's row {error} in round {len(rounds)}; request id {todo.request_id}"
                log.error(told)
                raise RpcError(grpc.StatusCode.INTERNAL, told) from error
        await context.write(pb.GenerateResponse(result=_result(todo, answer, target, rounds, span)))

    @contextlib.asynccontextmanager
    async def _rounds(self, todo: Plan, answer: Answer, target: Target, span: Span) -> AsyncIterator[Rounds]:
        """Make the rounds of a request, and free its sessions at both workers however it ends."""
        features = self._features(todo, target)
        verifier = TargetSession(
            self._workers.target_stub,
            session_start(todo, target.info.identity),
            verify_timeout_s=self._settings.verify_timeout_s,
            retry_s=self._settings.target_retry_s,
            on_lost=lambda status: self._lost("target", status),
            on_retry=self._instruments.count_retry,
            is_current=lambda: self._workers.serves(target),
            heads=self._heads,
            whole_rows=whole_rows(target.info, self._settings.max_message_mib),
            features=features,
        )
        drafter: DraftSession | None = None
        if self._workers.draft_stub is not None:
            drafter = DraftSession(
                self._workers.draft_stub,
                session_start(todo),
                info=lambda: self._workers.draft,
                timeout_s=self._settings.draft_timeout_s,
                on_lost=lambda status: self._lost("draft", status),
                features=features,
            )
        speculation = self._speculation_of(todo)
        gamma: GammaPolicy = FixedGamma(todo.gamma) if speculation is None else AdaptiveGamma(speculation)
        overlap = self._overlap if todo.may_adapt else FixedOverlap(False)

        def alone_s() -> float | None:
            return None if speculation is None else speculation.alone_s

        observer = RequestObserver(span, self._instruments, alone_s)
        rounds = Rounds(todo, answer, gamma, overlap, drafter, verifier, observer)
        # The last is closed first. Each gives its call up before it waits: a second cancellation leaves none open.
        async with contextlib.AsyncExitStack() as closing:
            if speculation is not None:
                speculation.sharing += 1
                closing.callback(speculation.leave)
            if drafter is not None:
                closing.push_async_callback(drafter.close)
            closing.push_async_callback(verifier.close)
            closing.push_async_callback(rounds.close)
            yield rounds

    def _features(self, todo: Plan, target: Target) -> FeatureRelay | None:
        """Return what takes hidden states to the draft; without drafts nobody needs them."""
        if not todo.gamma:
            return None
        room = feature_room(self._settings.max_message_mib)
        return FeatureRelay(lambda: self._workers.draft, target.info.features, room)

    def _speculation_of(self, todo: Plan) -> Speculation | None:
        """Return what gamma is chosen by, None where it is fixed; requests whose rows and drafts are alike share it."""
        if not todo.adaptive_gamma:
            return None
        alike = (todo.params.temperature == 0, todo.verification, todo.gamma)
        if alike not in self._speculation:
            self._speculation[alike] = Speculation(todo.gamma, lambda: self._admission.running)
        return self._speculation[alike]

    def _estimates(self) -> list[Estimate]:
        found = []
        # Read by the thread that exports: a request that is the first of its kind may come at the same time.
        for (greedy, rule, most), speculation in list(self._speculation.items()):
            of: dict[str, str | bool | int] = {"greedy": greedy, "verification": rule.name.lower(), "max_gamma": most}
            if speculation.costs.is_known:
                price = speculation.costs.price()
                parts = {"alone": price.alone_s, "asked": price.asked_s, "draft": price.draft_s}
                found.append(Estimate(of, speculation.rates.alpha, parts))
        return found

    def _lost(self, which: str, status: grpc.StatusCode) -> None:
        self._instruments.count_lost(which, status)
        self._workers.recheck()

    @contextlib.asynccontextmanager
    async def _deadline(self, context: Context) -> AsyncIterator[None]:
        """Bound the request by the client's deadline, or by the server's where there is none or it is sooner."""
        limit_s = context.time_remaining()
        settings = self._settings
        if limit_s is None:
            limit_s = settings.default_deadline_s
            said = f"the server's (--default-deadline-s) deadline of {limit_s:g} s"
        elif limit_s > settings.max_deadline_s:
            limit_s = settings.max_deadline_s
            said = f"the server's (--max-deadline-s) deadline of {limit_s:g} s"
        else:
            # What is left of it on arrival has many digits.
            said = f"the client's deadline of {limit_s:.3g} s"
        timer = asyncio.timeout(limit_s)
        try:
            async with timer:
                yield
        except TimeoutError:
            # Another TimeoutError from within is a bug.
            if not timer.expired():
                raise
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, f"{said} has passed") from None


@contextlib.contextmanager
def _request_span(context: Context, request_id: str, goes_on: bool) -> Iterator[Span]:
    """Open the request's SERVER span: a child of the trace context in the call's metadata, or else linked to that."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    clients = telemetry.extract_metadata(metadata)
    span = tracer.start_span(
        _METHOD,
        clients if goes_on else otel.Context(),
        kind=SpanKind.SERVER,
        attributes={"rpc.system.name": "grpc", "rpc.method": _METHOD, "paceline.request.id": request_id},
    )
    if not goes_on:
        # Not from the start, where it would have a say in whether this is sampled.
        span.add_link(trace.get_current_span(clients).get_span_context())
    status = "OK"
    try:
        yield span
    except asyncio.CancelledError:
        status = "CANCELLED"
        raise
    except Exception as error:
        status = status_of(error).name
        span.set_status(StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        span.set_attribute("rpc.response.status_code", status)
        span.end()


def _chunk(pieces: Sequence[Piece]) -> pb.TextChunk:
    return pb.TextChunk(
        text="".join(piece.text for piece in pieces),
        tokens=[pb.Token(id=piece.token, origin=_ORIGINS[piece.origin], text=piece.text) for piece in pieces],
    )


def _result(todo: Plan, answer: Answer, target: Target, rounds: Sequence[Round], span: Span) -> pb.GenerateResult:
    assert answer.finish is not None
    return pb.GenerateResult(
        request_id=todo.request_id,
        finish_reason=_FINISHES[answer.finish],
        stop_string=answer.stop_string,
        usage=pb.Usage(prompt_tokens=len(todo.prompt), completion_tokens=answer.count),
        seed=todo.seed,
        gamma=todo.gamma,
        adaptive_gamma=todo.adaptive_gamma,
        sampling=encode_sampling(todo.params),
        max_tokens=todo.max_tokens,
        speculation=speculation_stats(rounds),
        prompt_token_ids=todo.prompt,
        target=target.info.identity,
        verification=encode_verification(todo.verification),
        trace_id=f"{span.get_span_context().trace_id:032x}" if span.is_recording() else "",
    )
