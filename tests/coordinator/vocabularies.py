"""Tokenizers of the kinds that models come with, trained in a moment on a few lines."""

from __future__ import annotations

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "Ça va très bien, merci: l'élève a mangé une crème brûlée à Noël.",
    "Größe, Übermut und Straße; señor, mañana, niño.",
    "日本語のテキストと中文文本在一起。",
    "Emoji: 😀😃😄 👩‍👩‍👧‍👦 🇫🇷 ❤️ ✨✨✨ 🎉",
    "  indented    text\n\twith tabs\n\nand   runs of spaces",
    "<|im_ <im_start end|> |> brackets and bars < | >",
)


@functools.cache
def byte_level() -> Tokenizer:
    """Return a BPE tokenizer on bytes, as GPT-2, SmolLM2 and Qwen have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@functools.cache
def legacy_llama() -> Tokenizer:
    """Return a BPE tokenizer on characters with a fallback to bytes, a space put before every stretch: Llama 2."""
    return _characters(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), pre_tokenizer=None
    )


@functools.cache
def metaspace() -> Tokenizer:
    """Return the same with a space put before the beginning only."""
    return _characters(
        normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    )


def _characters(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None
) -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    described = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *described["vocab"]]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        # Characters outside the corpus are what the bytes are for.
        merges=[tuple(pair) for pair in described["merges"]],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(special, normalized=False, special=True) for special in SPECIALS])
    return tokenizer


KINDS = {"byte level": byte_level, "llama 2": legacy_llama, "metaspace": metaspace}
