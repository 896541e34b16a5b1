"""Settings of the target worker."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from services.common.rpc.settings import ModelSettings


class TargetSettings(ModelSettings):
    """Settings of the target worker; each also by environment, PACELINE_TARGET_<NAME>."""

    env_prefix: ClassVar[str] = "PACELINE_TARGET_"

    listen: str = Field("127.0.0.1:50052", description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    model: str = Field(
        "default", description="Local folder, hub id or GGUF file; `default` fetches SmolLM2-135M-Instruct once."
    )
    features: str = Field(
        "auto",
        pattern=r"^(auto|none|\d+(,\d+)*)$",
        description="Layers whose hidden states are kept for a draft, 7,15,22,30 say; auto: each quarter; none: off.",
    )
