"""Texts are only ever appended, and a head's tokens are the likeliest of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.distill.chat import Turns
from services.distill.corpus import Corpus, coverage, head_ids
from services.distill.errors import DistillError
from services.distill.writing import Text

VOCAB = 50
TURNS = Turns((5, 6), (7,), frozenset({1}), frozenset())


def save(path: Path, rows: list[list[int]], dtype: str = "uint16") -> Path:
    np.save(path, np.array(rows, dtype))
    return path


def finished(count: int, length: int = 10) -> list[Text]:
    texts = [Text(i, TURNS, length) for i in range(count)]
    for text in texts:
        while not text.done:
            text.push(7 if text.forced is None and len(text.tokens) == 4 else text.forced or 20 + text.index)
    return texts


def test_files_and_written_texts_come_together_and_stay(tmp_path: Path) -> None:
    first = save(tmp_path / "a.npy", [[5, 6, 10 + i] for i in range(6)])
    corpus = Corpus(tmp_path / "data", 10)
    corpus.add_files([first], VOCAB, seed=1)
    assert sorted(corpus.tokens[:, 2].tolist()) == list(range(10, 16))
    assert corpus.lengths.tolist() == [3] * 6
    corpus.add_written(finished(3), 10**6)
    again = Corpus(tmp_path / "data", 10)
    assert np.array_equal(again.tokens, corpus.tokens)
    again.add_files([first], VOCAB, seed=1)
    again.add_written(finished(5), 10**6)
    assert [(source.name, source.texts) for source in again.sources] == [("a.npy", 6), ("written", 3), ("written", 2)]
    assert np.array_equal(again.tokens[:9], corpus.tokens)
    assert len(again.tokens) == 11
    assert again.count == 6 * 3 + 5 * 10
    assert again.common_opening() == 2


def test_only_as_many_written_texts_are_taken_as_the_tokens_ask_for(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "data", 10)
    corpus.add_written(finished(8), 25)
    assert len(corpus.tokens) == 3
    corpus.add_written(finished(8), 40)
    assert len(corpus.tokens) == 4


def test_the_seed_gives_the_order(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", [[i] for i in range(40)])
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        corpus = Corpus(tmp_path / name, 10)
        corpus.add_files([path], VOCAB, seed)
        orders.append(corpus.tokens[:, 0].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_rows_of_signed_ids_may_end_in_minus_one(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "data", 10)
    corpus.add_files([save(tmp_path / "a.npy", [[3, 4, -1, -1]], "int32")], VOCAB, 0)
    assert corpus.lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("rows", "dtype", "words"),
    [([[1, VOCAB]], "uint16", "ids from 1 to 50: must be 0 to 49"), ([[0.5]], "float32", "must be token ids")],
)
def test_other_arrays_are_refused_by_name(tmp_path: Path, rows: list[list[int]], dtype: str, words: str) -> None:
    path = save(tmp_path / "bad.npy", rows, dtype)
    with pytest.raises(DistillError, match=words):
        Corpus(tmp_path / "data", 10).add_files([path], VOCAB, 0)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_text("no array")
    with pytest.raises(DistillError, match=r"--texts .*bad\.npy"):
        Corpus(tmp_path / "data", 10).add_files([tmp_path / "bad.npy"], VOCAB, 0)


def test_the_head_has_the_likeliest_tokens_and_some_always() -> None:
    counts = np.array([0, 0, 5, 9, 1, 7])
    ids = head_ids(counts, 3, always=[1])
    assert ids.tolist() == [1, 3, 5]
    assert coverage(counts, ids) == 16 / 22
    assert head_ids(counts, 100, always=[]).tolist() == [0, 1, 2, 3, 4, 5]
