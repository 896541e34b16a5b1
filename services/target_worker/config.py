"""Settings of the target worker."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.common.rpc.settings import ServerSettings


class TargetSettings(ServerSettings):
    """Settings of the target worker; each also by environment, PACELINE_TARGET_<NAME>."""

    env_prefix: ClassVar[str] = "PACELINE_TARGET_"

    listen: str = Field("127.0.0.1:50052", description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    model: str = Field(
        "default", description="Local folder, hub id or GGUF file; `default` fetches SmolLM2-135M-Instruct once."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Precision of weights and passes; auto is bfloat16 where the device is good at it."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
    device_map: str | None = Field(None, description="Spread a model over devices, as in transformers: auto, balanced.")
    attn_implementation: str | None = Field(None, description="As in transformers: sdpa, eager, flash_attention_2.")
    threads: int | None = Field(None, ge=1, description="CPU threads of a forward pass; unset leaves torch's choice.")
    max_sessions: int = Field(64, ge=1, description="Requests served at once, each with a KV cache of its own.")
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="Prompt tokens fed in one pass; other requests go between."
    )
    worker_id: str = Field("", description="Name in logs and traces; default HOST:PORT with the host's name.")
