"""What a worker's settings have to be to each other: said at the start, by flag, value and limit."""

from __future__ import annotations

import click
import pytest

from services.common.rpc.settings import ModelSettings, parse
from services.coordinator.config import CoordinatorSettings


def test_a_chunk_is_no_larger_than_a_pass() -> None:
    assert parse(ModelSettings, {"prefill_chunk_tokens": 64, "max_pass_tokens": 64}).max_pass_tokens == 64
    with pytest.raises(click.UsageError) as refusal:
        parse(ModelSettings, {"max_pass_tokens": 128})
    assert refusal.value.message == "--prefill-chunk-tokens is 256: must be at most --max-pass-tokens, 128"


def test_the_default_deadline_is_no_longer_than_the_longest() -> None:
    with pytest.raises(click.UsageError) as refusal:
        parse(CoordinatorSettings, {"max_deadline_s": 300.0})
    assert refusal.value.message == "--default-deadline-s is 600: must be at most --max-deadline-s, 300"
