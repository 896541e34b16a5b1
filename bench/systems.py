"""What is compared: the service over loopback, and transformers' own generate in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from paceline.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2
from services.common.engine.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to write; end-of-sequence tokens are ignored, so that all systems write as many tokens.

    Attributes:
        prompt: Token ids.
        temperature: 0 is greedy.
        tokens: How many to write.
        seed: Of the random numbers.
    """

    prompt: tuple[int, ...]
    temperature: float
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer, by the clock of whoever asked for it.

    Attributes:
        tokens: Ids of the answer.
        wall_s: From the request to its end.
        first_token_s: To the first tokens; None where they are not told one by one.
        rounds: What the service says of each of its rounds.
        weights_hash: Of the model that wrote it.
    """

    tokens: tuple[int, ...]
    wall_s: float
    first_token_s: float | None
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

    def __init__(self, name: str, stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, gamma: int | None) -> None:
        """Take a way to call it.

        Args:
            name: In the tables.
            stub: Of the coordinator, on a channel that is kept.
            gamma: Drafts in a round; None leaves it to the service.
        """
        self.name = name
        self._stub = stub
        self._gamma = gamma

    async def write(self, job: Job) -> Outcome:
        """Call Generate and time the stream."""
        request = coordinator_pb2.GenerateRequest(
            tokens=coordinator_pb2.TokenPrompt(ids=job.prompt),
            sampling=worker_pb2.SamplingParams(temperature=job.temperature, top_k=0, top_p=1.0, min_p=0.0),
            seed=job.seed,
            max_tokens=job.tokens,
            stop=coordinator_pb2.StopConditions(ignore_eos=True),
            gamma=self._gamma,
        )
        tokens: list[int] = []
        result = coordinator_pb2.GenerateResult()
        first_token_s: float | None = None
        started_s = time.perf_counter()
        async for response in self._stub.Generate(request):
            if response.HasField("result"):
                result = response.result
                continue
            if first_token_s is None:
                first_token_s = time.perf_counter() - started_s
            tokens.extend(token.id for token in response.chunk.tokens)
        wall_s = time.perf_counter() - started_s
        rounds = tuple(result.speculation.per_round)
        return Outcome(tuple(tokens), wall_s, first_token_s, rounds, result.target.weights_hash)


class Transformers:
    """transformers' own generate, with the weights, dtype and threads of the target worker."""

    name = "transformers"

    def __init__(self, loaded: LoadedModel) -> None:
        """Take a model; its author's generation settings are put aside, eos ids among them."""
        self._loaded = loaded
        # generate() fills what it is not told from here. Without eos ids nothing ends early, at no cost a step.
        loaded.model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]

    async def write(self, job: Job) -> Outcome:
        """Generate in this thread, the event loop included: nothing else is to run meanwhile."""
        ids = torch.tensor([job.prompt])
        sampling: dict[str, Any] = {"do_sample": False}
        if job.temperature:
            sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(job.seed)
        model: Any = self._loaded.model
        started_s = time.perf_counter()
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.tokens, **sampling)
        wall_s = time.perf_counter() - started_s
        tokens: Sequence[int] = output[0, len(job.prompt) :].tolist()
        return Outcome(tuple(tokens), wall_s, None, (), self._loaded.weights_hash)
