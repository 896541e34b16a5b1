"""A trained draft in the shape of a causal language model of transformers, so that the engine runs it like any other.

What it knows of the target's state before each token lies beside the keys and values, by place: s_i = F f_(i-1) where
the target's states f have come, else a_(i-1), its own after the token before. A step of drafting needs nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from services.common.engine.draft_model import DraftModel
from services.common.engine.projections import Projection


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """The target's states at some positions of a session.

    Attributes:
        start: Position of the first.
        features: bfloat16[positions, width].
    """

    start: int
    features: torch.Tensor

    @property
    def end(self) -> int:
        """One past the position of the last."""
        return self.start + len(self.features)


class Fed(Protocol):
    """One session's part of a pass; see `runner.Feed`."""

    @property
    def start(self) -> int:
        """Place of its first token."""

    @property
    def position(self) -> int:
        """Of the first token fed."""

    @property
    def tokens(self) -> Sequence[int]:
        """To feed."""

    @property
    def rows(self) -> int:
        """Logits are wanted after each of the last `rows` of them."""

    @property
    def given(self) -> Given | None:
        """What is known of the target's states now."""


class Output(NamedTuple):
    """What a forward returns.

    Attributes:
        logits: [1, rows, head].
    """

    logits: torch.Tensor


class _Running(threading.local):
    """The draft whose pass this thread runs."""

    draft: ServedDraft


# States are of the pass that runs, not of the one that was traced: a compiled forward asks for them by operators.
_running = _Running()
_library: Any = torch.library.Library("paceline_draft", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("recall(Tensor ids, Tensor like) -> Tensor")
_library.define("note(Tensor own) -> Tensor")


def _recall(ids: torch.Tensor, _like: torch.Tensor) -> torch.Tensor:
    """Return the state before each token; an operator."""
    return _running.draft.recall(ids)


def _recall_shape(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((*ids.shape, like.shape[-1]))


def _note(own: torch.Tensor) -> torch.Tensor:
    """Keep the draft's own states; an operator, its result used so that it is not left out."""
    return _running.draft.note(own).clone()


for _operator, _run, _shape in (("recall", _recall, _recall_shape), ("note", _note, torch.empty_like)):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline_draft::{_operator}", _shape, lib=_library)


class ServedDraft(nn.Module):
    """A draft over a pool.

    Attributes:
        draft: The model as it was trained.
        config: Of its layers.
        dtype: Of its weights.
        window: Positions that it looks back on.
        feature_width: Numbers in what it is fed with of the target's states at a position; 0 where it is not.
    """

    # As transformers' models have it.
    _supports_attention_backend = True

    def __init__(self, draft: DraftModel) -> None:
        """Take a draft over."""
        super().__init__()
        self.draft = draft
        self.config: PreTrainedConfig = draft.body.config
        self.dtype: torch.dtype = draft.head.dtype
        self.window = draft.config.window
        self.feature_width = draft.fuse.in_features if draft.fuse is not None else 0
        self._head = Projection(draft.head, None)
        self._hidden = draft.head.shape[1]
        self._states: torch.Tensor | None = None
        self._read = self._write = torch.empty(0, dtype=torch.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes beside its keys and values."""
        return self._hidden * self.dtype.itemsize if self.feature_width else 0

    def set_attn_implementation(self, name: str) -> None:
        """Choose how attention is computed."""
        self.draft.body.set_attn_implementation(name)

    def get_input_embeddings(self) -> nn.Module:
        """Return the target's embeddings."""
        return self.draft.embeddings

    def get_output_embeddings(self) -> SimpleNamespace:
        """Return what has the head's weights."""
        return SimpleNamespace(weight=self.draft.head)

    def allocate(self, size: int) -> None:
        """Make room for the states of `size` tokens."""
        if self.feature_width:
            # Two places more: one for what nobody will read, and one that stays zero, for the first token of a text.
            self._states = torch.zeros((size + 2, self._hidden), dtype=self.dtype, device=self.draft.head.device)

    def begin_pass(self, feeds: Sequence[Fed]) -> None:
        """Take in what is known of the target's states, and find the places of the next pass."""
        if self._states is None:
            return
        _running.draft = self
        nowhere, zero = len(self._states) - 2, len(self._states) - 1
        read: list[int] = []
        write: list[int] = []
        for feed in feeds:
            if feed.given is not None:
                self._take_in(feed.start, feed.given)
            first, end = feed.start + feed.position, feed.start + feed.position + len(feed.tokens)
            read += range(first, end)
            if feed.position == 0:
                read[-len(feed.tokens)] = zero
            # A single row is wanted of the last known token: what follows is drafted from the draft's own state.
            write += [end] if feed.rows == 1 else [nowhere] * feed.rows
        self._read = torch.tensor(read, device=self._states.device)
        self._write = torch.tensor(write or [nowhere], device=self._states.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        logits_to_keep: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Output:
        """Return the logits; before `allocate` all states are zero.

        Args:
            input_ids: [1, tokens].
            position_ids: Of each, [1, tokens].
            cache: Of keys and values.
            logits_to_keep: Rows that are wanted; None wants all.
            kwargs: For the layers.
        """
        traced = torch.compiler.is_compiling()
        states: torch.Tensor | None = None
        if self.feature_width:
            states = torch.ops.paceline_draft.recall(input_ids, self.draft.head) if traced else self.recall(input_ids)
        embedded = self.draft.embed(input_ids, states)
        own: torch.Tensor = self.draft.body(
            inputs_embeds=embedded, position_ids=position_ids, cache=cache, **kwargs
        ).last_hidden_state
        if logits_to_keep is not None:
            own = own[:, logits_to_keep]
            if self.feature_width:
                own = torch.ops.paceline_draft.note(own) if traced else self.note(own)
        return Output(self._head(own))

    def recall(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the state before each token of the pass: [1, tokens, hidden]."""
        if self._states is None:
            return torch.zeros((*input_ids.shape, self._hidden), dtype=self.dtype, device=input_ids.device)
        return self._states[self._read].unsqueeze(0)

    def note(self, own: torch.Tensor) -> torch.Tensor:
        """Keep the draft's own states after the rows of the pass, [1, rows, hidden]; return them."""
        if self._states is not None:
            # A compiled pass has the last row twice where it is the only one.
            self._states.index_copy_(0, self._write, own[0, : len(self._write)])
        return own

    def _take_in(self, start: int, given: Given) -> None:
        assert self._states is not None
        assert self.draft.fuse is not None
        first = start + given.start + 1
        features = given.features.to(self._states.device, self.dtype)
        self._states[first : first + len(features)] = self.draft.fuse(features)
