"""Tokenizers for tests: every token is one letter, so that text and tokens can be read off each other."""

from __future__ import annotations

import string

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.v1 import target_pb2

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def letter_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Return a tokenizer whose token i is the letter i: "a" is 0, "b" is 1."""
    letters = string.ascii_letters[:vocab_size]
    assert len(letters) == vocab_size, f"at most {len(string.ascii_letters)} tokens"
    tokenizer = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def fingerprint(vocab_size: int) -> str:
    """Return what the scripted workers say their tokenizer's fingerprint is."""
    return f"letters-{vocab_size}"


def tokenizer_response(vocab_size: int) -> target_pb2.GetTokenizerResponse:
    """Return the answer of a scripted target's GetTokenizer."""
    return target_pb2.GetTokenizerResponse(
        tokenizer_json=letter_tokenizer(vocab_size).to_str().encode(),
        chat_template=CHAT_TEMPLATE,
        generation_config_json="{}",
    )
