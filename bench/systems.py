"""What is compared: the service over loopback, and transformers' own generate in this process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from paceline.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2
from services.common.engine.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write; end-of-sequence tokens are ignored, so that all systems write as many tokens.

    Attributes:
        prompt: Token ids.
        temperature: 0 is greedy.
        tokens: How many to write.
        seed: Of transformers' random numbers. The service is sent none: a seed would change how drafts are verified.
        top_p: Of the distribution that is sampled from.
    """

    prompt: tuple[int, ...]
    temperature: float
    tokens: int
    seed: int
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer, by the clock of whoever asked for it.

    Attributes:
        tokens: Ids of the answer.
        wall_s: From the request to its end.
        first_token_s: To the first tokens.
        first_tokens: How many came first: a round may bring several.
        rounds: What the service says of each of its rounds.
        weights_hash: Of the model that wrote it.
    """

    tokens: tuple[int, ...]
    wall_s: float
    first_token_s: float
    first_tokens: int
    rounds: tuple[coordinator_pb2.RoundStats, ...]
    weights_hash: str


class System(Protocol):
    """Writes answers."""

    @property
    def name(self) -> str:
        """Its name in the tables."""
        ...

    async def write(self, job: Job) -> Outcome:
        """Write one answer."""
        ...


class Service:
    """This service: three processes, one of which is called."""

    def __init__(
        self,
        name: str,
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        gamma: int | None,
        verification: worker_pb2.Verification.ValueType = worker_pb2.VERIFICATION_UNSPECIFIED,
        sampled: bool | None = None,
    ) -> None:
        """Take a way to call it.

        Args:
            name: In the tables.
            stub: Of the coordinator, on a channel that is kept.
            gamma: Drafts in a round; None leaves it to the service.
            verification: How drafts are verified; unspecified leaves it to the service.
            sampled: Call as part of a trace of the caller's that is sampled, or is not; None is no trace.
        """
        self.name = name
        self._stub = stub
        self._gamma = gamma
        self._verification = verification
        self._sampled = sampled

    async def write(self, job: Job) -> Outcome:
        """Call Generate and time the stream."""
        request = coordinator_pb2.GenerateRequest(
            tokens=coordinator_pb2.TokenPrompt(ids=job.prompt),
            sampling=worker_pb2.SamplingParams(temperature=job.temperature, top_k=0, top_p=job.top_p, min_p=0.0),
            max_tokens=job.tokens,
            stop=coordinator_pb2.StopConditions(ignore_eos=True),
            gamma=self._gamma,
            verification=self._verification,
        )
        tokens: list[int] = []
        result = coordinator_pb2.GenerateResult()
        first_token_s, first_tokens = 0.0, 0
        started_s = time.perf_counter()
        async for response in self._stub.Generate(request, wait_for_ready=True, metadata=self._metadata()):
            if response.HasField("result"):
                result = response.result
                continue
            tokens.extend(token.id for token in response.chunk.tokens)
            if not first_tokens:
                first_token_s, first_tokens = time.perf_counter() - started_s, len(tokens)
        wall_s = time.perf_counter() - started_s
        rounds = tuple(result.speculation.per_round)
        return Outcome(tuple(tokens), wall_s, first_token_s, first_tokens, rounds, result.target.weights_hash)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._sampled is None:
            return ()
        return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{self._sampled:02x}"),)


class Transformers:
    """transformers' own generate, with the weights, dtype and threads of the target worker."""

    def __init__(
        self, loaded: LoadedModel, name: str = "transformers", options: Mapping[str, Any] | None = None
    ) -> None:
        """Take a model, whose generation settings are the caller's: no eos ids, so that nothing ends early.

        Args:
            loaded: The model.
            name: In the tables.
            options: More arguments of generate: an assistant, for example.
        """
        self.name = name
        self._loaded = loaded
        self._options = dict(options or {})

    async def write(self, job: Job) -> Outcome:
        """Generate in this thread, the event loop included: nothing else is to run meanwhile."""
        ids = torch.tensor([job.prompt])
        sampling: dict[str, Any] = {"do_sample": False}
        if job.temperature:
            sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": job.top_p}
        torch.manual_seed(job.seed)
        model: Any = self._loaded.model
        first = _FirstTokens()
        started_s = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=job.tokens,
            streamer=first,
            **sampling,
            **self._options,
        )
        wall_s = time.perf_counter() - started_s
        tokens: Sequence[int] = output[0, len(job.prompt) :].tolist()
        return Outcome(tuple(tokens), wall_s, first.at_s - started_s, first.count, (), self._loaded.weights_hash)


class _FirstTokens(BaseStreamer):
    """Notes when generate has its first tokens, and how many they are. What it is given first is the prompt."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.count = 0
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        """Take what generate has written."""
        self._puts += 1
        if self._puts == 2:
            self.at_s, self.count = time.perf_counter(), value.numel()

    def end(self) -> None:
        """Take note of the end: nothing is to be done."""
