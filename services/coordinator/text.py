"""Text to tokens and back, without torch and without model files: all of it comes from the target's GetTokenizer."""

from __future__ import annotations

import datetime
import json
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
        specials = {
            token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        # Longest first, so that one that begins with another is found as itself.
        self._specials = dict(sorted(specials.items(), key=lambda item: -len(item[0])))
        self._silent = frozenset(specials.values())
        self._special_tokens = special_tokens
        self._template = _environment().from_string(chat_template) if chat_template else None

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
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

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
        if not any(special in content for _, content in messages for special in self._specials):
            return list(self._tokenizer.encode(self._render(messages), add_special_tokens=False).ids)
        return self._encode_guarded(messages)

    def _encode_guarded(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Encode messages whose contents have the text of special tokens in them.

        A mark inside each such text keeps it apart from the template's own; then the rendered text is cut at the
        template's special tokens, the marks are taken out, and what lies between is encoded as plain text.
        """
        contents = "".join(content for _, content in messages)
        mark = next(m for n in range(len(contents) + 1) if (m := "\ue000" + "\ue001" * n + "\ue002") not in contents)
        marked = []
        for role, content in messages:
            for special in self._specials:
                content = content.replace(special, special[:1] + mark + special[1:])
            marked.append((role, content))
        rest = self._render(marked)
        ids: list[int] = []
        while rest:
            at, special = min(
                ((rest.find(s), s) for s in self._specials if s in rest),
                key=lambda hit: hit[0],
                default=(len(rest), ""),
            )
            plain = rest[:at].replace(mark, "")
            ids += self._plain.encode(plain, add_special_tokens=False).ids
            if special:
                ids.append(self._specials[special])
            rest = rest[at + len(special) :]
        return ids

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            roles = [role for role, _ in messages]
            raise InvalidFieldError(
                "chat.messages", roles, f"roles that the model's template takes ({error})"
            ) from None

    def _check_length(self, field: str, characters: int, limit: int) -> None:
        most = limit * self._longest_token
        if characters > most:
            raise InvalidFieldError(
                field, f"{characters} characters", f"at most what {limit} tokens of context can hold"
            )


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
