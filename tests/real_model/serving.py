"""SmolLM2 in float32 behind three real processes, with whichever drafter a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.v1 import coordinator_pb2 as pb
from tests.support.cluster import Reply
from tests.support.processes import Coordinator, Processes, Service

# Tokens of an answer.
LENGTH = 64


def chat(prompt: str) -> pb.ChatPrompt:
    """Return a conversation of one message."""
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=pb.ROLE_USER, content=prompt)])


class Serving:
    """One target worker, and a draft worker and a coordinator for each drafter that has been asked for.

    They stay up, so that a model is loaded once however many tests use it.
    """

    def __init__(self, processes: Processes, target: Path, drafts: dict[str, Callable[[], Path]]) -> None:
        """Start the target.

        Args:
            processes: Starts them, and ends them.
            target: Folder of the model.
            drafts: Names of model drafters and what makes their folders.
        """
        self._processes = processes
        self._drafts = drafts
        self._target: Service = processes.target("--model", str(target), "--dtype", "float32")
        self._coordinators: dict[str, Coordinator] = {}
        self._greedy: dict[tuple[str, int, str], Reply] = {}

    def coordinator(self, drafter: str) -> Coordinator:
        """Return the coordinator that uses a drafter: "ngram", or one of the models."""
        if drafter not in self._coordinators:
            if drafter == "ngram":
                worker = self._processes.draft()
            else:
                folder = self._drafts[drafter]()
                worker = self._processes.draft("--drafter", "model", "--model", str(folder), "--dtype", "float32")
            self._coordinators[drafter] = self._processes.coordinator(
                self._target, worker, wait_for_draft=drafter != "other tokenizer"
            )
        return self._coordinators[drafter]

    def greedy(self, drafter: str, gamma: int, prompt: str) -> Reply:
        """Return the greedy answer of LENGTH tokens to a chat prompt; generated once, as several tests look at it."""
        key = drafter, gamma, prompt
        if key not in self._greedy:
            self._greedy[key] = self.generate(drafter, chat=chat(prompt), gamma=gamma, max_tokens=LENGTH)
        return self._greedy[key]

    def greedy_answers(self, drafter: str, gamma: int, prompts: Sequence[str]) -> list[Reply]:
        """Return `greedy` of each prompt, two at a time: one drafts while the other verifies."""
        self.coordinator(drafter)
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda prompt: self.greedy(drafter, gamma, prompt), prompts))

    def generate(self, drafter: str, **request: Any) -> Reply:
        """Generate with a drafter; see `Coordinator.generate`."""
        return self.coordinator(drafter).generate(**request)
