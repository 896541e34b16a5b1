"""Continuous batching: one thread runs pass after pass, each over all requests that wait when it begins.

It begins as soon as anybody waits, or after the moment in which others are expected back (see `Gathering`).

Read `Engine._run` first: plan, run, hand out, and again. Sessions join and leave between passes.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from services.common.engine.admission import Admission
from services.common.engine.features import FeaturePool
from services.common.engine.gathering import Gathering, PassShape
from services.common.engine.kv_memory import KvMemory
from services.common.engine.model import LoadedModel
from services.common.engine.options import EngineOptions, pool_size
from services.common.engine.planner import Pass, Planner
from services.common.engine.runner import Feed, ModelRunner
from services.common.engine.scheduler import Share
from services.common.engine.served_draft import ServedDraft
from services.common.engine.session import ModelSession
from services.common.engine.stats import EngineCounters, EngineStats
from services.common.engine.work import SessionClosedError, Work
from services.common.specdec.errors import CapacityError

log = logging.getLogger(__name__)

# The contexts of those who asked for its parts, the seconds that it took, the positions that it fed.
OnPass: TypeAlias = Callable[[Sequence[contextvars.Context], float, int], None]

# So many failed passes in a row, each over one session, are the device's fault and not the sessions'.
_FAILURES = 5


class Engine:
    """A model, its KV pool, and the thread of the passes.

    Attributes:
        counters: What it has done.
        context_length: Longest sequence that a session can become.
        vocab_size: Ids 0..vocab_size-1 exist.
        needs_states: The model is a draft that is fed with the target's states.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        on_death: Callable[[], None] = lambda: None,
        on_pass: OnPass = lambda *_: None,
    ) -> None:
        """Allocate the pool, check the model's attention against the library's, warm up. Takes seconds.

        Args:
            loaded: The model; the engine takes it over.
            options: How many sessions it serves, and how.
            on_death: Called, from whatever thread, when the passes have ended for another reason than `close`: nothing
                that is asked from then on is answered.
            on_pass: Called after each pass, on the thread of the passes.

        Raises:
            StartupError: The model cannot be served, or there is no memory for a single session.
        """
        self.vocab_size = loaded.vocab_size
        self.needs_states = isinstance(loaded.model, ServedDraft) and loaded.model.feature_width > 0
        self.counters = EngineCounters()
        self._on_death, self._on_pass = on_death, on_pass
        self._ready = threading.Event()
        prepared: Future[tuple[ModelRunner, int, PassShape]] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(loaded, options, prepared), name="forward-passes", daemon=True
        )
        self._thread.start()
        self._runner, size, shape = prepared.result()
        self.context_length = min(loaded.context_length or size, size)
        self._memory = KvMemory(size, reuse=options.prefix_reuse and not self.needs_states)
        # Guards the memory's books, the sequences and the list of those that wait; never held during a pass.
        self._changed = threading.Condition()
        self._admission = Admission(self._memory, self._changed, options.admission)
        self._planner = Planner(self._memory, options.passes, self.counters)
        self._gathering, self._gathers = Gathering(shape), options.gather
        self._waiting: list[Work] = []
        self._closing = False
        self._failures = 0
        self._ready.set()

    @property
    def queue(self) -> int:
        """Requests that wait for a pass or are in one."""
        return len(self._waiting)

    @property
    def features(self) -> FeaturePool | None:
        """The hidden states of all places; None where none are kept."""
        return self._runner.features

    @property
    def memory(self) -> KvMemory:
        """The books of the pool; for reading."""
        return self._memory

    def stats(self) -> EngineStats:
        """Return what the engine has done and how things stand; from any thread."""
        with self._changed:
            return EngineStats(
                **dataclasses.asdict(self.counters),
                sessions_open=self._memory.sessions,
                sessions_waiting=self._admission.waiting,
                sessions_limit=self._admission.limits.sessions,
                requests_queued=self.queue,
                kv_reserved=self._memory.reserved,
                kv_kept=self._memory.kept,
                kv_size=self._memory.size,
            )

    async def open(self, capacity: int) -> ModelSession:
        """Reserve the places of a session; waits for its turn where there is no room.

        Args:
            capacity: Most tokens that will be fed, at most `context_length`.

        Raises:
            CapacityError: The queue is full, or did not move in time.
        """
        return ModelSession(self, await self._admission.reserve(capacity))

    def end(self, session: ModelSession) -> None:
        """Take a session's places back; they are another's from the next pass on. May be called again."""
        # Under the lock from the first step on: what is being planned finds a session open to the end, or closed.
        with self._changed:
            lease, session.lease = session.lease, None
            self._gathering.ended(session)
            self._changed.notify()
            if lease is not None:
                self._admission.release(lease)

    def forget(self, session: ModelSession) -> None:
        """Count nothing of a session as cached; from any thread."""
        with self._changed:
            if session.lease is not None:
                session.lease.sequence.cached = 0

    def submit(self, work: Work) -> None:
        """Let a request take part in the next pass."""
        with self._changed:
            if self._closing:
                raise SessionClosedError
            self._waiting.append(work)
            if not work.cancelled:
                self._gathering.came(work.session, time.perf_counter())
            self._changed.notify()

    async def close(self) -> None:
        """Wait for the running pass, drop the requests that wait, end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _live(
        self, loaded: LoadedModel, options: EngineOptions, prepared: Future[tuple[ModelRunner, int, PassShape]]
    ) -> None:
        """Do all of torch's work in this one thread, the preparations too.

        OpenMP keeps a team for every thread that has computed. With more teams than cores none of them waits for its
        next work awake, and a pass takes a third longer (33 ms for 25, measured with two cores and a second team).
        """
        try:
            prepared.set_result(_prepare(loaded, options))
        except BaseException as error:
            prepared.set_exception(error)
            return
        self._ready.wait()
        self._run()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (planned := self._next()) is not None:
                    for source, target, length in planned.copies:
                        self._runner.copy(source, target, length)
                    self._execute(planned.shares, planned.feeds)
        except BaseException:
            log.critical("the thread of the passes has ended: nothing can be answered any more")
            self._on_death()
            raise
        finally:
            # However it ends, nobody goes on waiting for this thread.
            with self._changed:
                self._closing = True
                for work in self._waiting:
                    work.finish(SessionClosedError())

    def _next(self) -> Pass | None:
        """Wait for requests and plan the next pass; None when the engine closes."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                self._waiting = [work for work in self._waiting if self._planner.wanted(work)]
                if wait_s := self._gathering_s():
                    self._changed.wait(wait_s)
                elif planned := self._planner.plan(self._waiting):
                    return planned
                else:
                    self._changed.wait()

    def _gathering_s(self) -> float:
        """Return how long those that wait had better wait for others."""
        if not self._gathers or not self._waiting:
            return 0.0
        return self._gathering.wait_s(time.perf_counter(), len(self._waiting))

    def _execute(self, shares: Sequence[Share[Work]], feeds: Sequence[Feed]) -> None:
        started_s = time.perf_counter()
        positions = sum(share.count for share in shares)
        for share in shares:
            share.work.start_pass(len(shares), positions)
        try:
            logits = self._runner.run(feeds)
        except Exception as error:
            if len(shares) > 1:
                # Whoever is to blame fails alone.
                log.exception("a pass over %d sessions failed: one by one", len(shares))
                for share, feed in zip(shares, feeds, strict=True):
                    self._execute([share], [feed])
            else:
                self._fail(shares[0].work, error)
                self._count_failure(error)
            return
        self._failures = 0
        elapsed_s = time.perf_counter() - started_s
        self._gathering.passed(positions, elapsed_s)
        self._note(shares, elapsed_s)
        self._on_pass([share.work.context for share in shares], elapsed_s, positions)
        for share, rows in zip(shares, logits, strict=True):
            if share.complete:
                self._step(share.work, rows)

    def _note(self, shares: Sequence[Share[Work]], elapsed_s: float) -> None:
        self.counters.passes += 1
        self.counters.shares += len(shares)
        self.counters.pass_s += elapsed_s
        with self._changed:
            for share in shares:
                self.counters.positions += share.count
                share.work.spent(elapsed_s)
                # What a closed session leaves is kept as it was when it closed.
                if share.work.session.lease is not None:
                    share.work.fed(share.count)

    def _step(self, work: Work, logits: torch.Tensor) -> None:
        """Hand the logits to the request; let it go on where it appends a token."""
        if work.cancelled:
            return
        started_s = time.perf_counter()
        try:
            token = work.step(logits)
        except Exception as error:
            self._fail(work, error)
            return
        with self._changed:
            work.spent(time.perf_counter() - started_s)
            if token is not None and work.session.lease is not None and work.append(token):
                return
            self._waiting.remove(work)
            # One that was closed during the pass has been forgotten already, and one may have asked for more already.
            if work.session.lease is not None and all(other.session is not work.session for other in self._waiting):
                self._gathering.left(work.session, time.perf_counter())
        work.finish()

    def _count_failure(self, error: Exception) -> None:
        """Let the thread end where the device has failed for good: a new process may have a device that works."""
        if not isinstance(error, torch.OutOfMemoryError):
            self._failures += 1
        if self._failures >= _FAILURES:
            raise error

    def _fail(self, work: Work, error: Exception) -> None:
        with self._changed:
            self._waiting.remove(work)
        if isinstance(error, torch.OutOfMemoryError):
            error = CapacityError("the device has no memory left for this pass")
        work.finish(error)


def _prepare(loaded: LoadedModel, options: EngineOptions) -> tuple[ModelRunner, int, PassShape]:
    runner = ModelRunner(loaded, options.feature_layers)
    size = pool_size(options, loaded, runner.token_bytes)
    runner.prepare(size)
    if options.compile:
        runner.compile()
    shape = runner.warm_up(options.passes.prefill_chunk)
    return runner, size, shape
