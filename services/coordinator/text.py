"""Text to tokens and back, without torch and without model files: all of it comes from the target's GetTokenizer."""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from services.common.specdec.errors import InvalidFieldError
from services.coordinator.detokenizer import Detokenizer


class TextCodec:
    """The target's tokenizer and chat template. Immutable, and safe to use from several threads.

    Attributes:
        vocab_size: Ids are below this.
    """

    def __init__(self, tokenizer_json: bytes, chat_template: str, special_tokens: dict[str, str]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        # A second one that reads special tokens as the plain text they are written as.
        self._plain = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        self._plain.encode_special_tokens = True
        for tokenizer in (self._tokenizer, self._plain):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._longest_token = max(len(token) for token in vocabulary)
        self._silent: set[int] = set()
        self._respell(self._tokenizer.get_added_tokens_decoder())
        # Not left out: templates ask `tools is not none`, which an undefined name is not.
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._template = _environment().from_string(chat_template) if chat_template else None

    def _respell(self, added: dict[int, tokenizers.AddedToken]) -> None:
        """Give every special token a second spelling, which no content can guess.

        With it the template's own special tokens are told from the same text in a content: `_real` spells the former
        and is a token of `_plain`, `_written` stands in for the latter until the template has been rendered.
        """
        # Digits and private-use characters, so that a template's upper or trim does not touch them.
        secret = f"\ue000{secrets.randbits(64)}"
        self._real: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._literal: dict[str, str] = {}
        self._id_of: dict[int, int] = {}
        self._break = f"{secret}\ue004"
        self._break_id = _add(self._plain, tokenizers.AddedToken(self._break, normalized=False))
        for id_, token in added.items():
            if not token.special:
                continue
            self._silent.add(id_)
            real, written = f"{secret}\ue001{id_}\ue002", f"{secret}\ue003{id_}\ue002"
            spelt = tokenizers.AddedToken(real, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
            self._id_of[_add(self._plain, spelt)] = id_
            self._real[token.content], self._written[token.content] = real, written
            self._literal[written] = token.content
        # Longest first, so that one that begins with another is found as itself. Without any, nothing is found.
        specials = sorted(self._real, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._any_written = re.compile(f"{secret}\ue003[0-9]+\ue002")

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """Return the incremental decoder of an answer to a prompt."""
        return Detokenizer(self._tokenizer, self._silent, prompt)

    def encode_text(self, text: str, limit: int) -> list[int]:
        """Return the tokens of raw text, special tokens and the tokenizer's own additions (a BOS) included.

        Args:
            text: The prompt.
            limit: Most tokens that can be used.

        Raises:
            InvalidFieldError: Longer than `limit` tokens can be, whatever they are.
        """
        self._check_length("text", len(text), limit)
        return _encode(self._tokenizer, text, True)

    def encode_chat(self, messages: Sequence[tuple[str, str]], limit: int) -> list[int]:
        """Return the tokens of a conversation in the model's chat template, ready for the assistant's turn.

        Special tokens written out in a content are plain text: content can close no turn and open no other.

        Args:
            messages: Pairs of role ("system", "user", "assistant") and content.
            limit: Most tokens that can be used.

        Raises:
            InvalidFieldError: The model has no template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidFieldError(
                "chat", f"{len(messages)} messages", "text or tokens: this model has no chat template"
            )
        self._check_length("chat.messages", sum(len(content) for _, content in messages), limit)
        plain = [(role, self._any_special.sub(lambda m: self._written[m[0]], content)) for role, content in messages]
        text = self._any_special.sub(lambda m: self._real[m[0]], self._render(plain))
        ids = _encode(self._plain, self._any_written.sub(lambda m: self._literal[m[0]], text), False)
        if not self._silent.isdisjoint(ids):
            # A unigram model makes special tokens of plain text too, unless something stands in between.
            broken = self._any_written.sub(lambda m: self._literal[m[0]].replace("", self._break, 2), text)
            ids = _encode(self._plain, broken, False)
        return [self._id_of.get(id_, id_) for id_ in ids if id_ != self._break_id]

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages], **self._variables
            )
        except jinja2.TemplateError as error:
            roles = [role for role, _ in messages]
            said = self._words_of(error, roles)
            raise InvalidFieldError("chat.messages", roles, f"roles that the model's template takes ({said})") from None

    def _words_of(self, error: jinja2.TemplateError, roles: Sequence[str]) -> str:
        """Return why a template refuses, unless it would not say so if the messages were empty: it may quote them."""
        assert self._template is not None
        try:
            self._template.render(messages=[{"role": role, "content": ""} for role in roles], **self._variables)
        except jinja2.TemplateError as other:
            if str(other) == str(error):
                return str(error)
        return "it says why in words that depend on a message"

    def _check_length(self, field: str, characters: int, limit: int) -> None:
        most = limit * self._longest_token
        if characters > most:
            raise InvalidFieldError(
                field, f"{characters} characters", f"at most what {limit} tokens of context can hold"
            )


def _add(tokenizer: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> int:
    """Add a token and return its id."""
    tokenizer.add_tokens([token])
    id_ = tokenizer.token_to_id(token.content)
    assert id_ is not None
    return id_


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text. Unlike `encode`, a batch of one lets the event loop run meanwhile."""
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


class _Generation(jinja2.ext.Extension):
    """Accept the `{% generation %}` blocks that training templates have; here they are only their contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment that chat templates are written for (the one of transformers)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
