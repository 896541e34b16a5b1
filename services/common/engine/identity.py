"""What tells one model and tokenizer from another, and what the coordinator needs of their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

_SAMPLE = 4096


def weights_hash(model: nn.Module) -> str:
    """Return a hash over every tensor's name, shape, dtype and up to 4096 of its elements, evenly spread.

    A sample and not all: hashing gigabytes would take longer than loading them.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        stride = -(-tensor.numel() // _SAMPLE) or 1
        sample = tensor.detach().reshape(-1)[::stride].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def token_map(tokenizer: Any) -> dict[str, int]:
    """Return the id of every token, added ones too."""
    vocabulary: dict[str, int] = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary


def tokenizer_fingerprint(token_ids: dict[str, int]) -> str:
    """Return a hash of the map from id to token."""
    pairs = sorted((token_id, token) for token, token_id in token_ids.items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def tokenizer_json(tokenizer: Any) -> bytes:
    """Return tokenizer.json, without truncation and padding: a prompt is never cut or filled in silence."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    text: str = plain.to_str()
    return text.encode()


def chat_template(tokenizer: Any) -> str:
    """Return the chat template, the one named "default" where there are several; empty where there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the named special tokens that templates refer to."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return {name: str(token) for name in names if (token := getattr(tokenizer, name, None)) is not None}


def generation_config_json(source: str, files: dict[str, str]) -> str:
    """Return what the model's author set in generation_config.json, "{}" where there is no such file.

    Read from the file: transformers' own object fills in defaults that nobody chose.

    Args:
        source: Folder or hub id.
        files: Names the GGUF file, if it is one: such a file comes alone.
    """
    found = (
        None if files else cached_file(source, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    )
    settings = json.loads(Path(found).read_text(encoding="utf-8")) if found else {}
    for bookkeeping in ("transformers_version", "_from_model_config"):
        settings.pop(bookkeeping, None)
    return json.dumps(settings)


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: the generation config's, else the model's, else the tokenizer's."""
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    for ids in (generation, model.config.get_text_config(decoder=True).eos_token_id, tokenizer.eos_token_id):
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
