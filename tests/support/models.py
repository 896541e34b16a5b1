"""Small models with random weights, saved as a user would have them: a folder with weights and a tokenizer.

make_tiny_llama(tmp_path / "target", seed=1)
make_tiny_llama(tmp_path / "draft", seed=2, layers=1)     # the same tokenizer, other weights
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 320
BOS, EOS = 0, 1
WINDOW = 8
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
    config = LlamaConfig(**_usual(vocab + padding, num_hidden_layers=layers, max_position_embeddings=context))
    return make_tiny(path, config, vocab, seed)


def make_tiny_mistral(path: Path, vocab: int = VOCAB, seed: int = 0, *, sliding_window: int = WINDOW) -> Path:
    """Save a random Mistral whose layers see `sliding_window` tokens back."""
    return make_tiny(path, MistralConfig(**_usual(vocab), sliding_window=sliding_window), vocab, seed)


def make_tiny_gpt2(path: Path, vocab: int = VOCAB, seed: int = 0, *, context: int = 512) -> Path:
    """Save a random GPT-2."""
    return make_tiny(path, _gpt2(vocab, context), vocab, seed)


def make_tiny(path: Path, config: PreTrainedConfig, vocab: int = VOCAB, seed: int = 0) -> Path:
    """Save a model of any configuration with random weights, and a tokenizer of `vocab` tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        # Biases begin as zeros, which would hide a model that forgets them.
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.3)
        model.save_pretrained(path)
    make_tokenizer(vocab).save_pretrained(path)
    return path


def _usual(vocab: int = VOCAB, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        # Wide enough that the distributions are not all alike.
        "initializer_range": 0.3,
        **changes,
    }


def _gpt2(vocab: int = VOCAB, context: int = 512) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocab,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=context,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.3,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_usual()),
    "qwen2 with biases": lambda: Qwen2Config(**_usual()),
    "qwen3 with norms of q and k": lambda: Qwen3Config(**_usual(), head_dim=16),
    "mistral with windows": lambda: MistralConfig(**_usual(), sliding_window=WINDOW),
    "gemma": lambda: GemmaConfig(**_usual(), head_dim=16),
    "gemma2 with softcaps and some windows": lambda: Gemma2Config(
        **_usual(), head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, attn_logit_softcapping=2.0
    ),
    "gemma3 with some windows": lambda: Gemma3TextConfig(
        **_usual(num_hidden_layers=3),
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt2 with learned positions": _gpt2,
    "gpt-neox": lambda: GPTNeoXConfig(**_usual()),
    "phi3 with one projection for q, k and v": lambda: Phi3Config(**_usual()),
    "mixtral with experts": lambda: MixtralConfig(**_usual(), num_local_experts=4, num_experts_per_tok=2),
}
"""Small configurations of the architectures that are served, by what is special about each."""
