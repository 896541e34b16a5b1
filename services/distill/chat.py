"""Where a target begins to write, and where a user's turn gives way to the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.common.engine.model import LoadedModel
from services.distill.errors import DistillError

_MARK = "paceline-user-turn"


@dataclass(frozen=True, slots=True)
class Turns:
    """The tokens around what the target writes as the user.

    Attributes:
        opening: What comes before the user's first word; never empty.
        bridge: From the user's last word to the answer's first; empty for a target without a chat template.
        ends: Tokens that end an answer.
        special: Tokens with a name, which a head always has.
        begun: How questions begin, for the target to go on from; an empty one leaves it free.
    """

    opening: tuple[int, ...]
    bridge: tuple[int, ...]
    ends: frozenset[int]
    special: frozenset[int]
    begun: tuple[tuple[int, ...], ...] = ()

    def start(self, index: int) -> tuple[int, ...]:
        """Return the tokens that text `index` starts with.

        Three in a row have the same beginning, for they are answered in three ways.
        """
        return self.opening + (self.begun[index // 3 % len(self.begun)] if self.begun else ())


def turns(loaded: LoadedModel, questions: Sequence[str] = (), longest: int | None = None) -> Turns:
    """Return how a conversation with this target begins.

    Args:
        loaded: The target.
        questions: Beginnings of questions.
        longest: Most tokens of one.

    Raises:
        DistillError: Its chat template cannot be rendered, nothing tells where a text begins, or a question's
            beginning is too long.
    """
    backend = Tokenizer.from_str(loaded.tokenizer_json.decode())
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **loaded.special_tokens)  # type: ignore[no-untyped-call]
    named = [
        token_id for token in loaded.special_tokens.values() if (token_id := backend.token_to_id(token)) is not None
    ]
    opening: list[int] = []
    bridge: list[int] = []
    if loaded.chat_template:
        before, after = _rendered(tokenizer, loaded)
        opening, bridge = (backend.encode(text, add_special_tokens=False).ids for text in (before, after))
    if not opening:
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else next(iter(loaded.eos_token_ids), None)
        if first is None:
            raise DistillError(
                f"{loaded.model_id} has no chat template, no BOS and no EOS token: nothing says where a text begins; "
                "give texts that it wrote with --texts"
            )
        opening = [int(first)]
    # A tokenizer may name tokens that the model has no logits for.
    special = frozenset(
        token for token in (*named, *loaded.eos_token_ids, *opening, *bridge) if token < loaded.vocab_size
    )
    begun = tuple(tuple(backend.encode(text, add_special_tokens=False).ids) for text in questions)
    for number, tokens in enumerate(begun, 1):
        if longest is not None and len(tokens) > longest:
            raise DistillError(f"--openings: line {number} has {len(tokens)} tokens: must be at most {longest}")
    return Turns(tuple(opening), tuple(bridge), frozenset(loaded.eos_token_ids), special, begun)


def question(loaded: LoadedModel, text: str) -> list[int]:
    """Return the tokens up to the answer's first, for a user who says `text`.

    Raises:
        DistillError: The chat template cannot be rendered.
    """
    backend = Tokenizer.from_str(loaded.tokenizer_json.decode())
    if not loaded.chat_template:
        return list(backend.encode(text).ids)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **loaded.special_tokens)  # type: ignore[no-untyped-call]
    before, after = _rendered(tokenizer, loaded)
    return list(backend.encode(f"{before}{text}{after}", add_special_tokens=False).ids)


def _rendered(tokenizer: Any, loaded: LoadedModel) -> tuple[str, str]:
    messages = [{"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=loaded.chat_template, tokenize=False, add_generation_prompt=True
        )
    # A template is a program: it raises what it likes.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DistillError(f"The chat template of {loaded.model_id} cannot be rendered: {reason}") from error
    before, mark, after = str(text).partition(_MARK)
    if not mark:
        raise DistillError(f"The chat template of {loaded.model_id} does not show what the user says")
    return before, after
