"""The model's forward over a packed pass: tokens of several sessions in one row, each at its own position."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from services.common.engine import attention
from services.common.engine.compiled import MOST_TOKENS, CompiledForward
from services.common.engine.features import FeaturePool
from services.common.engine.gathering import PassShape
from services.common.engine.kv_pool import KvPool, LayerShape, layer_shapes
from services.common.engine.model import LoadedModel, ModelLoadError
from services.common.engine.projections import exchange_projections
from services.common.engine.served_draft import Given, ServedDraft

log = logging.getLogger(__name__)

_CHECKED_TOKENS = 12
# Positions of the passes whose time is compared with that of one position, and how many of each are timed.
_MANY, _TIMED = 32, 3
# Greatest difference from the library's own forward, as a share of the greatest logit: float noise, no more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True, slots=True)
class Feed:
    """One session's part of a pass.

    Attributes:
        start: Place of the session's first token in the pool.
        position: Of the first token fed.
        tokens: To feed.
        rows: Logits are wanted after each of the last `rows` of them.
        given: For a draft that is fed with the target's states: what is known of them now.
    """

    start: int
    position: int
    tokens: Sequence[int]
    rows: int
    given: Given | None = None


class ModelRunner:
    """A model whose attention and cache are the pool's.

    Attributes:
        shapes: What each layer keeps of a token.
        features: The model's hidden states at every place, None where nobody wants them.
    """

    def __init__(self, loaded: LoadedModel, feature_layers: Sequence[int] = ()) -> None:
        """Find out what the model keeps of a token.

        Args:
            loaded: The model.
            feature_layers: After how many layers hidden states are kept for a draft; none keeps nothing.

        Raises:
            ModelLoadError: Its attention cannot be replaced.
            StartupError: It has no such layers.
        """
        self._loaded = loaded
        self._draft = loaded.model if isinstance(loaded.model, ServedDraft) else None
        known = loaded.forward_arguments
        # transformers renamed past_key_values; models with code of their own may still have the old name.
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._keeps_logits = "logits_to_keep" in known
        if not getattr(loaded.model, "_supports_attention_backend", False):
            raise self._refusal("its attention does not go through transformers' attention interface")
        self._sample = torch.arange(_CHECKED_TOKENS).mul(7).remainder(loaded.vocab_size)
        loaded.model.set_attn_implementation("eager")
        with torch.inference_mode():
            cache = DynamicCache(config=loaded.config)
            arguments = {self._cache_argument: cache, "use_cache": True}
            self._expected = loaded.model(input_ids=self._sample.unsqueeze(0).to(loaded.device), **arguments).logits[0]
        self.shapes: dict[int, LayerShape] = layer_shapes(cache)
        self.features = FeaturePool(loaded.model, feature_layers) if feature_layers else None
        # The library's own forward, with which the model is compared at start, looks back on everything.
        self._window: int | None = None
        self._pool: KvPool | None = None
        self._compiled: CompiledForward | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the KV pool, and beside it."""
        beside = sum(held.token_bytes for held in (self.features, self._draft) if held is not None)
        return beside + sum(shape.token_bytes for shape in self.shapes.values())

    @property
    def compiled(self) -> bool:
        """Whether small passes run through a compiled forward."""
        return self._compiled is not None

    def prepare(self, size: int) -> None:
        """Allocate a pool for `size` tokens, and compare with the library's own forward.

        Raises:
            ModelLoadError: They differ by more than float noise.
        """
        self._pool = KvPool(self.shapes, size)
        if self.features is not None:
            self.features.allocate(size, self._loaded.device)
        if self._draft is not None:
            self._draft.allocate(size)
        self._loaded.model.set_attn_implementation(attention.NAME)
        with torch.inference_mode():
            self._check("attention over the KV pool")
            undo = exchange_projections(self._loaded.model)
            try:
                self._check("fused projections")
            except Exception as error:
                log.warning("the model's own projections are used: %s", str(error))
                undo()
        self._window = self._draft.window if self._draft is not None else None

    def compile(self) -> None:
        """Run small passes through a compiled forward from now on; where that cannot be, log why and go on without."""
        with torch.inference_mode():
            try:
                try:
                    self._compile()
                except Exception as error:
                    if self._compiled is None or not self._compiled.is_loaded:
                        raise
                    log.warning("compiled anew, what was saved is of no use: %s", _reason(error))
                    self._compiled.drop()
                    self._compile(anew=True)
            # A compiler raises all kinds of exceptions, and no pass needs it.
            except Exception as error:
                self._compiled = None
                log.warning("passes are not compiled: %s", _reason(error))
                log.debug("why passes are not compiled", exc_info=True)

    def _compile(self, *, anew: bool = False) -> None:
        self._compiled = None
        arguments = self._cache_argument, self._keeps_logits, self.features
        self._compiled = CompiledForward(self._loaded, self._ready(), *arguments, anew=anew)
        self._check("compiled passes")
        self._compiled.save()

    def warm_up(self, chunk: int) -> PassShape:
        """Run passes of the usual sizes: the first of each size sets up kernels, threads and memory; time some more."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            for count in (*range(1, 18), 24, 32, 40, min(chunk, self._pool_size())):
                if count <= self._pool_size():
                    self._warm(count)
            most = max(2, min(_MANY, self._pool_size()))
            few, many = (min(self._warm(count) for _ in range(_TIMED)) for count in (1, min(most, self._pool_size())))
        position_s = max(0.0, (many - few) / (most - 1))
        log.info("warm after %.1f s", time.perf_counter() - started_s)
        return PassShape(max(0.0, few - position_s), position_s)

    def _warm(self, count: int) -> float:
        """Run a pass over some positions whose places nobody has yet; return its seconds."""
        started_s = time.perf_counter()
        self.run([Feed(0, 0, [0] * count, min(count, 10))])
        return time.perf_counter() - started_s

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy what is kept of a prefix from one session's places to another's."""
        self._ready().copy(source, target, length)
        if self.features is not None:
            self.features.copy(source, target, length)

    def run(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Run one pass; return for each feed the logits that it wants: [rows, vocab], in the model's dtype."""
        pool, device = self._ready(), self._loaded.device
        tokens: list[int] = []
        segments: list[attention.Segment] = []
        positions, places, wanted = [], [], []
        for feed in feeds:
            count, end = len(feed.tokens), feed.position + len(feed.tokens)
            segments.append(attention.Segment(len(tokens), count, feed.start, end, self._window))
            tokens += feed.tokens
            positions.append(torch.arange(feed.position, end))
            places.append(torch.arange(feed.start + feed.position, feed.start + end))
            wanted.append(torch.arange(len(tokens) - feed.rows, len(tokens)))
        at_places = torch.cat(places)
        pool.write_to(at_places)
        if self.features is not None:
            self.features.write_to(at_places)
        if self._draft is not None:
            self._draft.begin_pass(feeds)
        keep = torch.cat(wanted) if any(feed.rows for feed in feeds) else torch.tensor([len(tokens) - 1])
        ids, at = torch.tensor([tokens]).to(device), torch.cat(positions).unsqueeze(0).to(device)
        logits = self._logits(ids, at, keep.to(device), segments)
        if device.type == "cuda":
            # Its time is asked for, and its logits are read next.
            torch.cuda.synchronize(device)
        # Columns past the vocabulary are padding of the weights.
        logits = logits[:, : self._loaded.vocab_size]
        return list(torch.split(logits[: sum(feed.rows for feed in feeds)], [feed.rows for feed in feeds]))

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, segments: Sequence[attention.Segment]
    ) -> torch.Tensor:
        if self._compiled is not None and ids.shape[1] <= MOST_TOKENS:
            return self._compiled(ids, positions, keep, segments)
        arguments: dict[str, Any] = {self._cache_argument: self._pool, "use_cache": True, "segments": segments}
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self._loaded.model(input_ids=ids, position_ids=positions, **arguments).logits[0]
        return logits if self._keeps_logits else logits[keep]

    def _check(self, what: str) -> None:
        """Feed the sample in pieces as two sessions would be fed, and compare.

        Raises:
            ModelLoadError: The logits are not those of the library.
        """
        ids = self._sample.tolist()
        size = self._pool_size()
        if size < 2 * len(ids):
            ids = ids[: max(1, size // 2)]
        half, second = len(ids) // 2, len(ids)
        try:
            parts = self.run([Feed(0, 0, ids[:half], half), Feed(second, 0, ids, len(ids))]) if half else []
            # The rest of the first one, with some of what it has fed again after a crop.
            again = max(0, half - 2)
            parts += self.run([Feed(0, again, ids[again:], len(ids) - again)])
            parts += self.run([Feed(0, len(ids) - 1, ids[-1:], 1)])
        except attention.UnsupportedAttentionError as error:
            raise self._refusal(str(error)) from error
        positions = [*range(half), *(range(len(ids)) if half else ()), *range(again, len(ids)), len(ids) - 1]
        expected = self._expected[positions, : self._loaded.vocab_size].float()
        difference = (torch.cat(parts).float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
        if not difference <= _TOLERANCE[self._loaded.model.dtype]:
            raise self._refusal(f"{what}: logits differ from the library's by {difference:.2g} of the greatest")

    def _pool_size(self) -> int:
        return self._ready().size

    def _ready(self) -> KvPool:
        assert self._pool is not None, "prepare() comes first"
        return self._pool

    def _refusal(self, reason: str) -> ModelLoadError:
        model = self._loaded.model
        return ModelLoadError(f"{self._loaded.model_id} ({model.config.model_type}) cannot be served: {reason}")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
