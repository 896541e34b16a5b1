"""Small models with random weights, saved as a user would have them: a folder with weights and a tokenizer.

make_tiny_llama(tmp_path / "target", seed=1)
make_tiny_llama(tmp_path / "draft", seed=2, layers=1)     # the same tokenizer, other weights
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 320
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: 0 is <s>, 1 is </s>, then 256 bytes, then tokens that no text has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, *(f"<unused {i}>" for i in range(vocab - 2 - len(alphabet)))]
    assert len(tokens) == vocab, "at least 258 tokens"
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_llama(
    path: Path,
    vocab: int = VOCAB,
    seed: int = 0,
    *,
    layers: int = 2,
    context: int = 512,
    padding: int = 0,
) -> Path:
    """Save a random Llama with its tokenizer in `path`; return it.

    Args:
        path: Made if it is not there.
        vocab: Tokens, at least 258.
        seed: Of the weights.
        layers: Decoder layers.
        context: Longest sequence.
        padding: Rows of logits past the vocabulary.
    """
    config = LlamaConfig(
        vocab_size=vocab + padding,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=BOS,
        eos_token_id=EOS,
        # Wide enough that the distributions are not all alike.
        initializer_range=0.3,
    )
    return _save(path, LlamaForCausalLM, config, vocab, seed)


def make_tiny_mistral(path: Path, vocab: int = VOCAB, seed: int = 0, *, sliding_window: int = 8) -> Path:
    """Save a random Mistral whose layers see `sliding_window` tokens back."""
    config = MistralConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=sliding_window,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    return _save(path, MistralForCausalLM, config, vocab, seed)


def make_tiny_gpt2(path: Path, vocab: int = VOCAB, seed: int = 0, *, context: int = 512) -> Path:
    """Save a random GPT-2."""
    config = GPT2Config(
        vocab_size=vocab,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=context,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    return _save(path, GPT2LMHeadModel, config, vocab, seed)


def _save(path: Path, kind: type[PreTrainedModel], config: object, vocab: int, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(path)
    make_tokenizer(vocab).save_pretrained(path)
    return path
