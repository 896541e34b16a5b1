"""Draft models for SmolLM2, made on the spot: its own tokenizer, other weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def make_random_draft(target: Path, folder: Path) -> Path:
    """Save a small Llama with random weights and the target's tokenizer: nearly all of its drafts are wrong."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_noisy_draft(target: Path, folder: Path, noise: float) -> Path:
    """Save the target with each weight off by about the fraction `noise`: some of its drafts are wrong."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder
