"""Models of the architectures that people serve: a batch of ragged sessions equals the library one by one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, GptOssConfig, Llama4TextConfig, Phi3Config, PreTrainedConfig

from services.common.engine.engine import Engine
from services.common.engine.model import DtypeName, ModelLoadError
from services.common.engine.options import EngineOptions
from services.common.engine.scheduler import PassLimits
from tests.support.engines import Library, StartEngine, assert_close, evaluate, held, load, random_tokens
from tests.support.models import ARCHITECTURES, VOCAB, WINDOW, make_tiny


async def batch_against_library(start_engine: StartEngine, folder: Path, dtype: DtypeName, tolerance: float) -> None:
    engine = await start_engine(folder, dtype, passes=PassLimits(prefill_chunk=24))
    library = Library(folder, dtype)
    source = random.Random(5)
    texts = [random_tokens(source, length) for length in (1, 5, WINDOW, WINDOW + 1, 21, 40)]
    sessions = [await engine.open(60) for _ in texts]

    async def round_of_all(base_lengths: list[int]) -> None:
        """Ask all while the engine is held, so that they share passes from the first one on."""
        hold, holding = await held(holder)
        rows = [min(1 + i, len(text) - base) for i, (text, base) in enumerate(zip(texts, base_lengths, strict=True))]
        asked = [
            asyncio.create_task(evaluate(session, base, text[base:], count))
            for session, text, base, count in zip(sessions, texts, base_lengths, rows, strict=True)
        ]
        await asyncio.sleep(0)
        hold.release()
        await holding
        for text, count, logits in zip(texts, rows, await asyncio.gather(*asked), strict=True):
            assert_close(logits, library.logits(text, count), tolerance)

    holder = await engine.open(1)
    await round_of_all([0] * len(texts))
    # Each keeps some of what it has, and goes on past the window.
    kept = [len(text) - source.randrange(min(4, len(text))) for text in texts]
    texts = [text[:base] + random_tokens(source, 3 + i) for i, (text, base) in enumerate(zip(texts, kept, strict=True))]
    await round_of_all(kept)
    assert engine.counters.shares > 2 * engine.counters.passes


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_a_ragged_batch_equals_the_library(start_engine: StartEngine, tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path / "model", ARCHITECTURES[name]())
    await batch_against_library(start_engine, folder, "float32", 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2 with softcaps and some windows"])
async def test_a_ragged_batch_equals_the_library_in_bfloat16(
    start_engine: StartEngine, tmp_path: Path, name: str
) -> None:
    folder = make_tiny(tmp_path / "model", ARCHITECTURES[name]())
    await batch_against_library(start_engine, folder, "bfloat16", 5e-2)


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "attention with s_aux": lambda: GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1),
    "has layers that cannot be served (chunked_attention)": lambda: Llama4TextConfig(
        **SMALL, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8
    ),
    "its attention does not go through transformers' attention interface": lambda: BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4, initializer_range=0.3
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(tmp_path: Path, reason: str) -> None:
    config: PreTrainedConfig = REFUSED[reason]()
    folder = make_tiny(tmp_path / "model", config)
    with pytest.raises(ModelLoadError) as caught:
        Engine(load(folder), EngineOptions(kv_cache_memory="64MiB"))
    assert reason in str(caught.value)
    assert config.model_type in str(caught.value)


def longrope(factors: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * factors,
        "long_factor": [4.0] * factors,
        "original_max_position_embeddings": 64,
    }


async def test_the_context_of_a_longrope_model_ends_where_all_positions_would_turn(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    config = Phi3Config(
        **SMALL, max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=longrope(4)
    )
    folder = make_tiny(tmp_path / "model", config)
    engine = await start_engine(folder)
    assert engine.context_length == 64
    text = random_tokens(random.Random(1), 64)
    session = await engine.open(64)
    first = await evaluate(session, 0, text[:50])
    library = Library(folder)
    assert_close(first, library.logits(text[:50], 1))
    assert_close(await evaluate(session, 50, text[50:], 5), library.logits(text, 5))
