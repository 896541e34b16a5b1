"""The real coordinator with scripted workers, all over gRPC on loopback.

async with scripted_cluster(law, draft=DraftScript(bad_q=BadRow.NAN, bad_q_at=1)) as cluster:
    answer = await cluster.generate([0, 1], gamma=3, seed=7, max_tokens=20)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.metrics import Meter

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import coordinator_pb2_grpc, worker_pb2
from services.common.rpc.codec import encode_sampling
from services.common.specdec.types import SamplingParams
from services.coordinator.app import Coordinator
from services.coordinator.config import CoordinatorSettings
from tests.support.laws import Law
from tests.support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker
from tests.support.scripts import DraftScript, TargetScript

_OPTIONS = {"draft_timeout_s": 60.0, "shutdown_grace_s": 0.0, "max_requests": 1024, "overlap": "off"}


@dataclass(frozen=True)
class Reply:
    """One whole answer.

    Attributes:
        chunks: As they came.
        result: The final message.
    """

    chunks: tuple[pb.TextChunk, ...]
    result: pb.GenerateResult

    @property
    def text(self) -> str:
        """The answer's text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        """The answer's token ids."""
        return [token.id for chunk in self.chunks for token in chunk.tokens]

    @property
    def origins(self) -> list[int]:
        """The origin of each token."""
        return [token.origin for chunk in self.chunks for token in chunk.tokens]

    @property
    def offsets(self) -> list[int]:
        """The offset in its round of each token."""
        return [offset for done in self.result.speculation.per_round for offset in range(done.emitted)]


@dataclass
class Cluster:
    """A coordinator and its two scripted workers.

    Attributes:
        law: The tables of both workers.
        coordinator: The real one, in this process.
        draft: Its script, its counts, its start and stop.
        target: The same.
        spare_drafts: More drafts behind the same name.
        spare_targets: The same.
        channel: To the coordinator.
        stub: On that channel.
    """

    law: Law
    coordinator: Coordinator
    draft: ScriptedDraft
    target: ScriptedTarget
    spare_drafts: Sequence[ScriptedDraft]
    spare_targets: Sequence[ScriptedTarget]
    channel: grpc.aio.Channel
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        gamma: int | None = None,
        seed: int | None = 0,
        max_tokens: int = 16,
        params: SamplingParams | None = None,
        timeout_s: float = 60.0,
        **fields: Any,
    ) -> Reply:
        """Generate one answer past any eos, by the plain rule.

        Args:
            prompt: Token ids.
            gamma: Drafts in a round; None leaves it to the coordinator.
            seed: Key of the random numbers; None leaves it to the coordinator, and lets gamma adapt.
            max_tokens: Length of the answer.
            params: Sampling; plain by default.
            timeout_s: Deadline of the call.
            fields: Other fields of the request; they win.
        """
        request = pb.GenerateRequest(
            **{
                "tokens": pb.TokenPrompt(ids=prompt),
                "gamma": gamma,
                "seed": seed,
                "max_tokens": max_tokens,
                "sampling": encode_sampling(params or SamplingParams()),
                "stop": pb.StopConditions(ignore_eos=True),
                "verification": worker_pb2.VERIFICATION_TOKEN,
                **fields,
            }
        )
        chunks: list[pb.TextChunk] = []
        result: pb.GenerateResult | None = None
        call = self.stub.Generate(request, timeout=timeout_s)
        try:
            async for reply in call:
                if reply.HasField("chunk"):
                    chunks.append(reply.chunk)
                else:
                    result = reply.result
        finally:
            call.cancel()
        assert result is not None, "the stream ended without a result"
        return Reply(tuple(chunks), result)


@contextlib.asynccontextmanager
async def scripted_cluster(
    law: Law,
    *,
    draft: DraftScript | None = None,
    target: TargetScript | None = None,
    eos_ids: Sequence[int] = (),
    context_length: int = 4096,
    draft_context_length: int = 4096,
    draft_address: str | None = None,
    wait_for_draft: bool = True,
    spares: int = 0,
    meter: Meter | None = None,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run the real coordinator with two scripted workers on free ports.

    Args:
        law: The tables of both workers.
        draft: How the draft behaves; honest by default.
        target: How the target behaves; honest by default.
        eos_ids: The target's.
        context_length: The target's.
        draft_context_length: The draft's.
        draft_address: Where the coordinator looks for the draft; by default where it is.
        wait_for_draft: Begin only when the coordinator uses the draft. It is asked by short requests, which the
            scripts see; they are honest until then.
        spares: How many more workers of each kind there are; honest, and draining until told to `serve`.
        meter: Gets the coordinator's metrics.
        settings: Fields of `CoordinatorSettings`. By default nothing is ever late.
    """
    drafter = ScriptedDraft(law, context_length=draft_context_length)
    scorer = ScriptedTarget(law, eos_ids=eos_ids, context_length=context_length)
    spare_drafts = [ScriptedDraft(law, context_length=draft_context_length) for _ in range(spares)]
    spare_targets = [ScriptedTarget(law, eos_ids=eos_ids, context_length=context_length) for _ in range(spares)]
    async with contextlib.AsyncExitStack() as stack:
        for worker in (drafter, scorer, *spare_drafts, *spare_targets):
            await worker.start()
            stack.push_async_callback(worker.stop)
        for spare in (*spare_drafts, *spare_targets):
            await spare.drain()
        addresses = {
            "listen": "127.0.0.1:0",
            "draft": _name(drafter, *spare_drafts) if draft_address is None else draft_address,
            "target": _name(scorer, *spare_targets),
        }
        options = addresses | _OPTIONS | settings
        coordinator = Coordinator(CoordinatorSettings.model_validate(options), meter)
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        await asyncio.wait_for(coordinator.wait_until_ready(), 30)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(coordinator.address))
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        cluster = Cluster(law, coordinator, drafter, scorer, spare_drafts, spare_targets, channel, stub)
        if wait_for_draft:
            await _wait_for_draft(cluster)
        drafter.script, scorer.script = draft or DraftScript(), target or TargetScript()
        for worker in (drafter, scorer):
            worker.requests = worker.forward_tokens = worker.streams = 0
        yield cluster


def _name(*workers: ScriptedWorker) -> str:
    """Return a gRPC name that all the workers are behind."""
    return f"ipv4:{','.join(worker.address for worker in workers)}"


async def _wait_for_draft(cluster: Cluster) -> None:
    for _ in range(1_000):
        if not (await cluster.generate([0, 0], gamma=1, max_tokens=2)).result.speculation.degraded_rounds:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the coordinator never used the draft")
