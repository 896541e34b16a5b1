"""Settings of the draft worker."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from services.common.rpc.settings import ModelSettings


class DraftSettings(ModelSettings):
    """Settings of the draft worker; each also by environment, PACELINE_DRAFT_<NAME>."""

    env_prefix: ClassVar[str] = "PACELINE_DRAFT_"

    listen: str = Field("127.0.0.1:50051", description="Address to listen on, HOST:PORT; port 0 takes a free one.")
    drafter: Literal["ngram", "model"] = Field(
        "ngram", description="ngram looks the last tokens up in the text so far; model runs a causal LM."
    )
    model: str = Field(
        "",
        description="With --drafter model: local folder (a draft of `paceline distill`, or any model), hub id, GGUF "
        "file; `default` is the trained draft of the default target.",
    )
    target_model: str = Field(
        "", description="With a draft that `paceline distill` made: its target, where that is not where it was then."
    )
    ngram_first: int = Field(
        0,
        ge=0,
        le=16,
        description="With --drafter model: look up first, and believe a match of this many tokens; 0: off.",
    )
    ngram_max_tokens: int = Field(4, ge=1, le=16, description="Longest run of last tokens that is looked up.")
    ngram_min_tokens: int = Field(2, ge=1, le=16, description="Shortest run whose match is believed.")

    draft_top_k: int = Field(
        128, ge=0, description="Draft from this many of the likeliest tokens, after the request's own filters; 0: all."
    )
    draft_top_p: float = Field(
        1.0, gt=0, le=1, description="Of those, draft from the likeliest that hold this share of their mass; 1: all."
    )

    @model_validator(mode="after")
    def _consistent(self) -> DraftSettings:
        if self.drafter == "model" and not self.model:
            raise ValueError("--drafter model needs --model")
        if self.ngram_min_tokens > self.ngram_max_tokens:
            raise ValueError(
                f"--ngram-min-tokens is {self.ngram_min_tokens}: must be at most --ngram-max-tokens,"
                f" {self.ngram_max_tokens}"
            )
        return self
