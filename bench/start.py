"""The services with the default model, and the same model in this process for transformers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from bench.measure import Question
from bench.prompts import Prompt
from paceline.v1 import coordinator_pb2_grpc
from services.cli.child import Child
from services.cli.cluster import COORDINATOR, Cluster, local_cluster
from services.cli.progress import progress
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.rpc.channel import open_channel

_HOME = "PACELINE_HOME"
_SERVICE = "paceline.v1.CoordinatorService"


@dataclass(frozen=True, slots=True)
class Arguments:
    """More arguments of the three commands."""

    coordinator: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    target: tuple[str, ...] = ()


DEFAULTS = Arguments()


async def start_and_load(
    stack: contextlib.AsyncExitStack, prompts: Sequence[Prompt]
) -> tuple[Cluster, LoadedModel, list[Question]]:
    """Start the services with their defaults, for as long as the stack; load the model; tokenise the prompts."""
    cluster = await start(stack)
    loaded = load()
    return cluster, loaded, questions(prompts)


async def start(
    stack: contextlib.AsyncExitStack,
    arguments: Arguments = DEFAULTS,
    name: str = "",
    variables: Mapping[str, str] | None = None,
) -> Cluster:
    """Start the three services, for as long as the stack; with more variables in their environment."""
    with progress() as report:

        def say(words: str) -> None:
            report(f"{name}: {words}" if name else words)

        lines = (arguments.coordinator, arguments.draft, arguments.target)
        return await stack.enter_async_context(local_cluster(*lines, {**_environment(), **(variables or {})}, say))


async def start_beside(stack: contextlib.AsyncExitStack, cluster: Cluster, arguments: Sequence[str]) -> str:
    """Start a second coordinator before a cluster's workers, for as long as the stack; return its address."""
    listen = ("--listen", "127.0.0.1:0")
    child = await Child.spawn(COORDINATOR, [*listen, *arguments, *cluster.workers], _environment(), None)

    async def stop() -> None:
        child.signal(signal.SIGTERM)
        await child.close()

    stack.push_async_callback(stop)
    return await child.address()


async def connect(stack: contextlib.AsyncExitStack, address: str) -> coordinator_pb2_grpc.CoordinatorServiceAsyncStub:
    """Return a way to call a coordinator, on a channel that is kept."""
    channel = open_channel(address, _SERVICE, max_message_mib=64, keepalive_s=10.0)
    return coordinator_pb2_grpc.CoordinatorServiceStub(await stack.enter_async_context(channel))


def load(model: str = "default") -> LoadedModel:
    """Load a model into this process, as the target worker does."""
    with progress() as report:
        report("loading the model for transformers")
        loaded = load_model(LoadOptions(_source(model)))
    # generate() fills what it is not told from here. Without eos ids nothing ends early, at no cost a step.
    loaded.model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    return loaded


def questions(prompts: Sequence[Prompt], model: str = "default") -> list[Question]:
    """Return the prompts in a model's chat template, or plain where it has none, tokenised once for all systems."""
    tokenizer: Any = AutoTokenizer.from_pretrained(_source(model))
    made = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.text}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        else:
            ids = tokenizer(prompt.text).input_ids
        made.append(Question(prompt.question_id, prompt.category, tuple(ids)))
    return made


def _source(model: str) -> str:
    """Return where a model's files are."""
    if model != "default":
        return model
    with progress() as report:
        return str(ensure_default_model(paceline_home(), report))


def _environment() -> dict[str, str]:
    """Return this environment without the services' settings: what is measured is their defaults."""
    ours = ("PACELINE_", "OTEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours) or name == _HOME}
