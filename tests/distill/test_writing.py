"""What the target writes is a function of the seed and the text's number, whatever else happens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from services.common.engine.model import LoadedModel
from services.distill.chat import Turns, turns
from services.distill.writing import ANSWERING, ASKING, Shards, Text, write
from tests.support.engines import Library, engines
from tests.support.models import make_tokenizer

WIDTH = 48
TURNS = Turns(opening=(5, 6), bridge=(7, 8, 9), ends=frozenset({1}), special=frozenset())


async def written(
    folder: Path, shards: Path, *, batch: int, seed: int = 3, tokens: int = 250, most: int = 10**9
) -> Shards:
    """Let the target write; stop where `most` tokens are there."""
    async with engines() as start:
        engine = await start(folder)
        known = Shards(shards, TURNS, WIDTH)
        stopped = [False]

        def report(count: int) -> None:
            stopped[0] = count >= most

        await write(engine, known, tokens=tokens, seed=seed, batch=batch, until=lambda: stopped[0], report=report)
    return known


def rows(shards: Shards, count: int) -> list[list[int]]:
    finished = [text.tokens for text in shards.finished()]
    assert len(finished) >= count
    return finished[:count]


async def test_texts_do_not_depend_on_the_batch(folder: Path, tmp_path: Path) -> None:
    alone = rows(await written(folder, tmp_path / "alone", batch=1), 6)
    together = rows(await written(folder, tmp_path / "together", batch=5), 6)
    assert alone == together
    assert len({tuple(row) for row in alone}) == len(alone), "each text has a key of its own"
    other = rows(await written(folder, tmp_path / "other", batch=5, seed=4), 6)
    assert all(a != b for a, b in zip(alone, other, strict=True))


async def test_a_stopped_run_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    part = await written(folder, tmp_path / "part", batch=3, tokens=10**6, most=60)
    unfinished = [list(text.tokens) for text in part.texts if not text.done]
    assert any(len(tokens) > len(TURNS.opening) for tokens in unfinished), "stopped in the middle of a text"
    read_again = Shards(tmp_path / "part", TURNS, WIDTH)
    for read, text in zip(read_again.texts, part.texts, strict=True):
        # The pass that ran when it was stopped may have added a token after the files were written.
        assert len(text.tokens) - 1 <= len(read.tokens)
        assert read.tokens == text.tokens[: len(read.tokens)]
    # Texts are written one after another: so many tokens are not had without all that had been begun.
    count = len(part.texts)
    whole = await written(folder, tmp_path / "whole", batch=3, tokens=count * WIDTH)
    mended = await written(folder, tmp_path / "part", batch=2, tokens=count * WIDTH)
    assert rows(mended, count) == rows(whole, count)


async def test_texts_are_sampled_as_their_part_says(folder: Path, tmp_path: Path) -> None:
    shards = await written(folder, tmp_path / "texts", batch=4)
    library = Library(folder)
    for text in shards.finished()[:6]:
        replay = Text(text.index, TURNS, WIDTH)
        for at in range(len(TURNS.opening), len(text.tokens)):
            token, logits = text.tokens[at], library.logits(text.tokens[:at], 1)[0]
            if replay.forced is not None:
                assert token == replay.forced
            elif replay.params is ASKING:
                assert float(logits.max() - logits[token]) <= 3 + 1e-3
            elif replay.params.temperature == 0:
                assert float(logits.max() - logits[token]) <= 1e-4
            replay.push(token)
        assert replay.done


def test_the_answer_begins_after_the_bridge() -> None:
    text = Text(1, TURNS, 20)
    assert text.tokens == [5, 6]
    assert text.params is ASKING
    for token in (100, 7):
        assert text.forced is None
        text.push(token)
    for token in (8, 9):
        assert text.forced == token
        text.push(token)
    assert text.forced is None
    assert text.params is ANSWERING[1]
    text.push(7)
    assert text.forced is None, "in an answer it is a token like others"
    text.push(1)
    assert text.done


def test_a_turn_that_does_not_end_is_ended() -> None:
    text = Text(0, TURNS, 30)
    while text.forced is None:
        text.push(100)
    assert len(text.tokens) == 2 + 10
    assert text.forced == 7


def test_the_end_of_the_text_ends_a_turn_but_not_the_text() -> None:
    text = Text(0, TURNS, 30)
    text.push(1)
    assert not text.done
    assert text.forced == 7


def test_without_a_template_the_first_words_are_the_turn() -> None:
    bare = Turns((0,), (), frozenset({1}), frozenset())
    text = Text(2, bare, 30)
    for _ in range(10):
        assert text.params is ASKING
        text.push(50)
    assert text.params is ANSWERING[2]
    text.push(1)
    assert text.done


def test_turns_are_the_chat_template_around_what_the_user_says(target: LoadedModel) -> None:
    found = turns(target)
    tokenizer = make_tokenizer()
    assert tokenizer.decode(found.opening) == "<s>user: "
    assert tokenizer.decode(found.bridge) == "\nassistant: "
    assert found.ends == {1}
    assert {0, 1} <= found.special


async def test_shards_are_whole_or_not_there(folder: Path, tmp_path: Path) -> None:
    await written(folder, tmp_path / "texts", batch=4, most=60)
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["shard-00000.npy"]
    saved = np.load(tmp_path / "texts" / "shard-00000.npy")
    assert saved.shape[1] == WIDTH
    assert saved.dtype == np.int32
    assert torch.from_numpy(saved).min() == -1


async def test_questions_begin_as_they_are_told_to(folder: Path, tmp_path: Path) -> None:
    begun = dataclasses.replace(TURNS, begun=((20, 21, 22), (), (30,)))
    known = Shards(tmp_path / "begun", begun, WIDTH)
    async with engines() as start:
        engine = await start(folder)
        stopped = [False]

        def report(count: int) -> None:
            stopped[0] = count >= 60

        await write(engine, known, tokens=900, seed=3, batch=4, until=lambda: stopped[0], report=report)
        stopped[0] = False
        # What was stopped is read again: a beginning is not a part of what was written.
        known = Shards(tmp_path / "begun", begun, WIDTH)
        await write(engine, known, tokens=900, seed=3, batch=4, until=lambda: False, report=lambda _: None)
    texts = [text.tokens for text in known.finished()]
    assert len(texts) > 18
    for number, tokens in enumerate(texts):
        first = begun.begun[number // 3 % 3]
        assert tuple(tokens[: 2 + len(first)]) == (*TURNS.opening, *first)
    free = {tuple(tokens[2:5]) for number, tokens in enumerate(texts) if number // 3 % 3 == 1}
    assert len(free) > 1, "where nothing is said, the target begins as it likes"
