"""The target writes its own prompts and answers, many at a time.

Left to begin where a user's turn begins, a chat model writes a question that it was trained on, and then its answer
(Xu et al. 2024, arXiv 2406.08464). What text i says is a function of the seed and i: its uniforms are keyed by both, so
neither the batch nor a stop in the middle changes it, up to float noise in a target's logits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
import torch

from services.common.engine.engine import Engine
from services.common.engine.processors import distributions, is_bad
from services.common.specdec.randomness import Purpose, uniform
from services.common.specdec.sampling import sample
from services.common.specdec.types import SamplingParams
from services.distill.chat import Turns
from services.distill.errors import DistillError

# A user's turn at temperature 1 derails now and then: only tokens within e^-3 of the likeliest.
ASKING: Final = SamplingParams(temperature=1.0, min_p=math.exp(-3))
ANSWERING: Final = (SamplingParams(temperature=1.0), SamplingParams(temperature=0.7), SamplingParams(temperature=0.0))
"""Text i is answered as number i modulo 3 says."""
_OPENING_WORDS = 32
"""Without a chat template, so many tokens stand for the user's turn: greedy texts would all be the same."""
_SHARD = 64
_SAVE_EVERY_S = 60.0


def longest_turn(width: int) -> int:
    """Return how many tokens of a text of `width` the target may write as the user."""
    return width // 3


class Text:
    """A conversation as it is written, token by token.

    Attributes:
        index: Its number.
        tokens: So far, the opening included.
        width: Most tokens.
        done: Nothing follows.
    """

    def __init__(self, index: int, turns: Turns, width: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.done = False
        self._turns = turns
        self.width = width
        start = turns.start(index)
        self._forced = deque(start)
        self._started = len(start)
        self._answering = False
        self._longest_turn = len(start) + (longest_turn(width) if turns.bridge else min(_OPENING_WORDS, width // 3))
        for token in start:
            self.push(token)

    @property
    def forced(self) -> int | None:
        """The next token, where the chat template says what it is."""
        return self._forced[0] if self._forced else None

    @property
    def params(self) -> SamplingParams:
        """How the next token is sampled."""
        return ANSWERING[self.index % len(ANSWERING)] if self._answering else ASKING

    def push(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        if self._forced:
            self._forced.popleft()
            self._answering = not self._forced and len(self.tokens) > self._started
        elif self._answering or not self._turns.bridge:
            self.done = token in self._turns.ends
            self._answering = self._answering or len(self.tokens) >= self._longest_turn
        elif token == self._turns.bridge[0]:
            self._forced.extend(self._turns.bridge[1:])
            self._answering = not self._forced
        elif token in self._turns.ends or len(self.tokens) >= self._longest_turn:
            self._forced.extend(self._turns.bridge)
        self.done = self.done or len(self.tokens) >= self.width


class Shards:
    """Texts in files of 64, finished or not, by number.

    Attributes:
        texts: All that have been begun, from number 0 on without a gap.
    """

    def __init__(self, folder: Path, turns: Turns, width: int) -> None:
        """Read what an earlier run has written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._turns = turns
        self._width = width
        self.texts: list[Text] = []
        for number in count():
            path = self._path(number)
            if not path.exists():
                break
            for row in np.load(path):
                text = self.begin()
                for token in row[len(text.tokens) :]:
                    if token < 0:
                        break
                    text.push(int(token))
        self._saved = [len(text.tokens) for text in self.texts]

    def begin(self) -> Text:
        """Return a new text, the next by number."""
        self.texts.append(Text(len(self.texts), self._turns, self._width))
        return self.texts[-1]

    def finished(self) -> list[Text]:
        """Return the texts before the first one that is not finished."""
        gap = next((i for i, text in enumerate(self.texts) if not text.done), len(self.texts))
        return self.texts[:gap]

    def save(self) -> None:
        """Write the shards that have changed, each as a whole or not at all."""
        lengths = [len(text.tokens) for text in self.texts]
        for number in range(-(-len(self.texts) // _SHARD)):
            part = slice(number * _SHARD, (number + 1) * _SHARD)
            if lengths[part] == self._saved[part]:
                continue
            rows = np.full((len(lengths[part]), self._width), -1, np.int32)
            for row, text, length in zip(rows, self.texts[part], lengths[part], strict=True):
                row[:length] = text.tokens[:length]
            partial = self._path(number).with_suffix(".partial")
            with partial.open("wb") as file:
                np.save(file, rows)
            partial.replace(self._path(number))
        self._saved = lengths

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.npy"


async def write(
    engine: Engine,
    shards: Shards,
    *,
    tokens: int,
    seed: int,
    batch: int,
    until: Callable[[], bool],
    report: Callable[[int], None],
) -> None:
    """Let the target write until the finished texts have `tokens` tokens, or `until()`; what there is, is kept.

    Args:
        engine: Of the target.
        shards: What has been written so far; saved each minute and at the end.
        tokens: Enough of them.
        seed: Of all texts.
        batch: Texts at a time.
        until: Is asked every fifth of a second.
        report: Gets the number of tokens written, unfinished texts included.

    Raises:
        DistillError: The target's logits are not finite.
    """

    def enough() -> bool:
        return sum(len(text.tokens) for text in shards.finished()) >= tokens

    def numbers() -> Iterator[Text]:
        yield from [text for text in shards.texts if not text.done]
        while not enough():
            yield shards.begin()

    pending = numbers()

    async def writer() -> None:
        for text in pending:
            await _finish(engine, text, seed)

    writers = [asyncio.create_task(writer()) for _ in range(batch)]
    saved_s = time.monotonic()
    try:
        while not (until() or enough()):
            done, _ = await asyncio.wait(writers, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                break
            report(sum(len(text.tokens) for text in shards.texts))
            if time.monotonic() - saved_s > _SAVE_EVERY_S:
                shards.save()
                saved_s = time.monotonic()
    finally:
        for task in writers:
            task.cancel()
        results = await asyncio.gather(*writers, return_exceptions=True)
        shards.save()
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _finish(engine: Engine, text: Text, seed: int) -> None:
    """Write one text to its end, or until cancelled: then it ends where the last pass left it."""

    def draw(logits: torch.Tensor) -> tuple[bool, int | None]:
        token = text.forced
        if token is None:
            (row,) = distributions(logits, text.params)
            if is_bad(row):
                return False, None
            # The number of the text in the place of a round's, the position in that of an offset.
            token = sample(row, uniform(seed, text.index, len(text.tokens), Purpose.DRAFT))
        text.push(token)
        return True, None if text.done else token

    count_left = text.width - len(text.tokens)
    session = await engine.open(text.width)
    try:
        drawing = session.generate(0, list(text.tokens), count_left, draw)
        async with contextlib.aclosing(drawing):
            async for good, _ in drawing:
                if not good:
                    raise DistillError(f"The target's logits are not finite after {len(text.tokens)} tokens")
    finally:
        session.close()
