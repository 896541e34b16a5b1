"""How many sessions an engine serves, and the size of the KV pool that follows from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from services.common.engine.admission import AdmissionLimits
from services.common.engine.memory import kv_budget
from services.common.engine.model import LoadedModel
from services.common.engine.scheduler import PassLimits
from services.common.specdec.errors import StartupError

log = logging.getLogger(__name__)

# A pool that holds fewer tokens than this (or the model's context, where that is less) serves nobody.
_LEAST_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How many sessions an engine serves, and how.

    Attributes:
        kv_cache_memory: Of the pool: "2GiB", or a share of what the device has free such as "25%".
        passes: How large a pass may become.
        admission: How many sessions there may be, and how many may wait.
        compile: Compile the model's forward, which takes a minute or so, or load what an earlier start compiled.
        prefix_reuse: Copy the keys and values of a beginning that another session has had.
        gather: Let a pass wait for sessions that are about to come back, see `Gathering`.
        feature_layers: After how many layers hidden states are kept for a draft; none keeps nothing.
    """

    kv_cache_memory: str = "25%"
    passes: PassLimits = field(default_factory=PassLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    compile: bool = False
    prefix_reuse: bool = True
    gather: bool = True
    feature_layers: tuple[int, ...] = ()


def pool_size(options: EngineOptions, loaded: LoadedModel, token_bytes: int) -> int:
    """Return how many tokens the KV pool holds, and log what that means.

    Args:
        options: With the memory that it may take.
        loaded: The model.
        token_bytes: Bytes that a token takes.

    Raises:
        StartupError: There is not the memory, or it would hold no session worth serving.
    """
    affordable = kv_budget(options.kv_cache_memory, loaded.device) // token_bytes
    least = min(loaded.context_length or _LEAST_CONTEXT, _LEAST_CONTEXT)
    if affordable < least:
        raise StartupError(
            f"--kv-cache-memory is {options.kv_cache_memory}: it holds {affordable} tokens of {token_bytes} bytes, "
            f"must hold at least {least}"
        )
    # More than all sessions at full context could never be used. A context of 0 is no limit.
    size = min(affordable, options.admission.sessions * loaded.context_length) or affordable
    context = min(loaded.context_length or size, size)
    log.info(
        "KV cache: %.1f MiB, %d bytes a token, %d tokens: %d sessions at the full context of %d, at most %d",
        *(size * token_bytes / 2**20, token_bytes, size, size // context, context, options.admission.sessions),
    )
    if context < loaded.context_length:
        log.warning(
            "--kv-cache-memory %s holds no session at the model's context of %d: limited to %d tokens",
            *(options.kv_cache_memory, loaded.context_length, context),
        )
    return size
