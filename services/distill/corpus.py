"""The texts that a draft learns from: from files and from what the target wrote here; only ever appended to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.distill.errors import DistillError
from services.distill.writing import Text

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Source:
    """Where some of the texts are from.

    Attributes:
        name: Of the file; "written" is what this tool let the target write.
        key: SHA-256 of the file; empty for what was written.
        texts: How many.
    """

    name: str
    key: str
    texts: int


class Corpus:
    """tokens.npy, lengths.npy and sources.json of a folder.

    Attributes:
        tokens: int32[texts, width], 0 past the end of a text.
        lengths: int64[texts].
        sources: Where they are from.
    """

    def __init__(self, folder: Path, width: int) -> None:
        """Read what is there."""
        self._folder = folder
        self.tokens: Tokens = np.zeros((0, width), np.int32)
        self.lengths: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.sources: list[Source] = []
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "sources.json").exists():
            self.sources = [Source(**source) for source in json.loads((folder / "sources.json").read_text())]
            known = sum(source.texts for source in self.sources)
            # A run that was killed while it appended has left more rows than it has told of.
            self.tokens = np.load(folder / "tokens.npy")[:known]
            self.lengths = np.load(folder / "lengths.npy")[:known]

    @property
    def count(self) -> int:
        """Tokens in all texts."""
        return int(self.lengths.sum())

    def add_files(self, paths: Sequence[Path], vocab_size: int, seed: int) -> None:
        """Append the texts of files that are not in yet, in an order that the seed gives.

        Raises:
            DistillError: A file that is no array of token ids of this vocabulary.
        """
        rows: list[Tokens] = []
        sources: list[Source] = []
        for path in paths:
            key = _sha256(path)
            if key in {source.key for source in (*self.sources, *sources)}:
                continue
            array = _read(path, vocab_size)
            rows += list(array)
            sources.append(Source(path.name, key, len(array)))
        order = np.random.default_rng([seed, len(self.tokens)]).permutation(len(rows))
        self._append([rows[i][rows[i] >= 0] for i in order], sources)

    def add_written(self, texts: Sequence[Text], tokens: int) -> None:
        """Append finished texts that are not in yet, as far as is needed for `tokens` tokens of them."""
        known = sum(source.texts for source in self.sources if not source.key)
        ends = np.cumsum([len(text.tokens) for text in texts])
        needed = int(np.searchsorted(ends, tokens)) + 1
        new = [np.array(text.tokens, np.int32) for text in texts[known:needed]]
        self._append(new, [Source("written", "", len(new))] if new else [])

    def common_opening(self) -> int:
        """Return how many tokens all texts have in common at their beginning: nothing is to be learnt there."""
        if not len(self.tokens):
            return 0
        same = (self.tokens == self.tokens[:1]).all(axis=0)
        length = int(self.lengths.min())
        return min(length, int(same.argmin()) if not same.all() else length)

    def counts(self, vocab_size: int, first: int = 0, last: int | None = None) -> npt.NDArray[np.int64]:
        """Return how often each token stands in texts first..last - 1, after the common opening."""
        counts = np.zeros(vocab_size, np.int64)
        opening = self.common_opening()
        for row, length in zip(self.tokens[first:last], self.lengths[first:last], strict=True):
            counts += np.bincount(row[opening:length], minlength=vocab_size)
        return counts

    def _append(self, rows: Sequence[Tokens], sources: Sequence[Source]) -> None:
        if not rows:
            return
        width = self.tokens.shape[1]
        more = np.zeros((len(rows), width), np.int32)
        for into, row in zip(more, rows, strict=True):
            into[: len(row)] = row[:width]
        self.tokens = np.concatenate([self.tokens, more])
        self.lengths = np.concatenate([self.lengths, [min(len(row), width) for row in rows]])
        self.sources += sources
        for name, array in (("tokens.npy", self.tokens), ("lengths.npy", self.lengths)):
            with (self._folder / f"{name}.partial").open("wb") as file:
                np.save(file, array)
            os.replace(self._folder / f"{name}.partial", self._folder / name)
        # Last: what this file does not tell of was never added.
        text = json.dumps([{"name": s.name, "key": s.key, "texts": s.texts} for s in self.sources], indent=2)
        (self._folder / "sources.json.partial").write_text(text + "\n")
        os.replace(self._folder / "sources.json.partial", self._folder / "sources.json")


def head_ids(counts: npt.NDArray[np.int64], size: int, always: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the tokens that a head has rows for, ascending: the likeliest by what the target wrote, and some always.

    Args:
        counts: int64[vocab], how often each was written.
        size: How many; the whole vocabulary where that is smaller.
        always: Tokens that are in whatever was written.
    """
    ranks = counts.astype(np.int64)
    ranks[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-ranks, kind="stable")[:size])


def coverage(counts: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> float:
    """Return the share of what was written that these tokens are."""
    return float(counts[ids].sum() / max(1, counts.sum()))


def _read(path: Path, vocab_size: int) -> Tokens:
    try:
        array = np.load(path)
    except (OSError, ValueError) as error:
        raise DistillError(f"--texts {path}: {error}") from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "iu" or not array.size:
        raise DistillError(f"--texts {path}: must be token ids, integers of shape [texts, positions]")
    least, most = int(array.min()), int(array.max())
    if most >= vocab_size or least < -1:
        raise DistillError(
            f"--texts {path}: has ids from {least} to {most}: must be 0 to {vocab_size - 1}, the target's vocabulary "
            "(-1 fills up short rows)"
        )
    return array.astype(np.int32)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DistillError(f"--texts {path}: {error.strerror}") from error
