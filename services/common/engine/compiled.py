"""A model's forward compiled by torch.compile: norms, rotations and activations fused, no Python between them.

There are two graphs, of one token and of any other number, saved for the next start. Attention and the packed
projections stay what they are, behind operators that the compiler does not look into. Python objects cannot enter a
graph: the operators find the pass that runs where `CompiledForward` has left it for its thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from services.common.engine import attention
from services.common.engine.default_model import paceline_home
from services.common.engine.features import FeaturePool
from services.common.engine.kv_pool import KvPool
from services.common.engine.model import LoadedModel
from services.common.engine.projections import Project, Projection
from services.common.engine.saved_graphs import Graph, SavedGraphs

log = logging.getLogger(__name__)

# Larger passes run eager: what a graph saves does not grow with a pass, and its loops are of one thread.
MOST_TOKENS = 64

_NAME = "paceline_compiled"
_OPTIONS: dict[str, Any] = {
    # The loops are so short that waking threads for them costs more than it saves.
    "cpp.threads": 1,
    # Round where the eager forward rounds: passes of one session, compiled and not, and other workers then agree.
    "emulate_precision_casts": True,
    # Weights and modules do not change: looking at each of them before a pass would cost a millisecond.
    "guard_filter_fn": lambda guards: [False for _ in guards],
}


class _Running(threading.local):
    """The pass that this thread runs."""

    pool: KvPool
    segments: Sequence[attention.Segment]
    projects: Sequence[Project]
    features: FeaturePool | None


_running = _Running()
_library: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float? scaling, int? window, float? softcap) -> Tensor"
)
_library.define("project(Tensor x, int index, int width) -> Tensor")
_library.define("keep(Tensor states, int part) -> Tensor")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Write the pass's keys and values to the pool and attend to each session's; an operator."""
    keys, values = _running.pool.update(key, value, layer)
    attended, _ = attention.packed_attention(
        *(None, query, keys, values, None),
        segments=_running.segments,
        scaling=scaling,
        sliding_window=window,
        softcap=softcap,
    )
    return attended


def _attend_shape(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_args: Any) -> torch.Tensor:
    return value.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


def _project(x: torch.Tensor, index: int, _width: int) -> torch.Tensor:
    """Compute one of the model's packed projections; an operator."""
    return _running.projects[index](x)


def _project_shape(x: torch.Tensor, _index: int, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _keep(states: torch.Tensor, part: int) -> torch.Tensor:
    """Write a part of the pass's features; an operator, its result used so that it is not left out."""
    assert _running.features is not None
    return _running.features.write(states, part).clone()


def _keep_shape(states: torch.Tensor, _part: int) -> torch.Tensor:
    return torch.empty_like(states)


for _operator, _run, _shape in (
    ("attend", _attend, _attend_shape),
    ("project", _project, _project_shape),
    ("keep", _keep, _keep_shape),
):
    _library.impl(_operator, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline::{_operator}", _shape, lib=_library)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface's
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as the model's forward calls it while it is traced; see `packed_attention`."""
    attention.refuse_unsupported(kwargs)
    attend = torch.ops.paceline.attend
    return attend(query, key, value, module.layer_idx, scaling, sliding_window, softcap), None


AttentionInterface.register(_NAME, _attention)


class _NoCache(Cache):
    """Hands the pass's own keys and values on: the operator writes them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        return 0


class CompiledForward:
    """The compiled forward of one model over one pool."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        cache_argument: str,
        keeps_logits: bool,
        features: FeaturePool | None = None,
        *,
        anew: bool = False,
    ) -> None:
        """Load the graphs, or compile them, which takes a minute or so; the model itself is left as it was.

        Args:
            loaded: The model; its attention is `packed_attention` over the pool.
            pool: Where sessions' keys and values are.
            cache_argument: What the model's forward calls its cache.
            keeps_logits: It has the argument `logits_to_keep`.
            features: Where its hidden states are kept, if they are.
            anew: Compile, whatever has been saved.

        Raises:
            Exception: Of many kinds, where there is no compiler or the model cannot be compiled as a whole.
        """
        cache = _chosen_cache()
        forward = _forward(loaded.model, cache_argument, keeps_logits)
        self._pool = pool
        self._features = features
        with _dressed(loaded.model, features) as self._projects:
            self._saved = SavedGraphs(
                cache / "graphs",
                loaded.model,
                {
                    "weights": loaded.weights_hash,
                    "dtype": loaded.dtype,
                    "config": loaded.model.config.to_json_string(),
                    "cache": cache_argument,
                    "keeps_logits": keeps_logits,
                    "features": features.layers if features is not None else (),
                    "packed": len(self._projects),
                },
            )
            self._graphs: dict[bool, Graph] = {}
            self._compiled: list[bool] = []
            for several in (False, True):
                started_s = time.perf_counter()
                graph = None if anew else self._saved.load(_name(several), forward.__globals__)
                if graph is None:
                    graph = _compile(forward, _example(several, loaded.device), several)
                    self._compiled.append(several)
                self._graphs[several] = graph
                came = "compiled" if several in self._compiled else "loaded"
                log.info("passes of %s %s in %.1f s", _name(several), came, time.perf_counter() - started_s)

    @property
    def is_loaded(self) -> bool:
        """Whether a graph of it was saved by an earlier start."""
        return len(self._compiled) < len(self._graphs)

    def save(self) -> None:
        """Save what has been compiled, for the next start."""
        for several in self._compiled:
            self._saved.save(_name(several), self._graphs[several])

    def drop(self) -> None:
        """Remove what has been saved."""
        self._saved.drop()

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, segments: Sequence[attention.Segment]
    ) -> torch.Tensor:
        """Return the logits of the rows to keep, [rows, ids]; the pool knows the places.

        Args:
            ids: Tokens, [1, tokens], at most `MOST_TOKENS` of them.
            positions: Of each, [1, tokens].
            keep: Rows, at least one.
            segments: The sessions.
        """
        _running.pool, _running.segments, _running.projects = self._pool, segments, self._projects
        _running.features = self._features
        several, rows = ids.shape[1] > 1, len(keep)
        if several and rows == 1:
            # A graph of any size is one of any size but 1.
            keep = keep.repeat(2)
        return self._graphs[several](ids, positions, keep)[:rows]


def _name(several: bool) -> str:
    return "several-tokens" if several else "one-token"


def _chosen_cache() -> Path:
    """Let compiled code lie with what else Paceline keeps, unless the user has chosen another folder; return which."""
    # A private name: where torch lacks it, there are no compiled passes.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch has set its default when it was imported: a temporary folder.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(paceline_home() / "compiled")
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def _forward(model: PreTrainedModel, cache_argument: str, keeps_logits: bool) -> Callable[..., torch.Tensor]:
    known: dict[str, Any] = {cache_argument: _NoCache(), "use_cache": True}

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        wanted = {"logits_to_keep": keep} if keeps_logits else {}
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, **known, **wanted).logits[0]
        return logits if keeps_logits else logits[keep]

    return forward


@contextmanager
def _dressed(model: PreTrainedModel, features: FeaturePool | None) -> Iterator[list[Project]]:
    """Exchange what has to be looked up in a pass for operators while a model is traced; give what projections compute.

    Those are attention, packed projections, and the keeping of hidden states.
    """
    packed = [module for module in model.modules() if isinstance(module, Projection) and module.packed]
    projects = [module.project for module in packed]
    model.set_attn_implementation(_NAME)
    if features is not None:
        features.keep = _keep_by_operator
    try:
        for index, module in enumerate(packed):
            module.project = _operator_of(index, module.width)
        yield projects
    finally:
        for module, project in zip(packed, projects, strict=True):
            module.project = project
        model.set_attn_implementation(attention.NAME)
        if features is not None:
            features.keep = features.write


def _keep_by_operator(states: torch.Tensor, part: int) -> torch.Tensor:
    kept: torch.Tensor = torch.ops.paceline.keep(states, part)
    return kept


def _operator_of(index: int, width: int) -> Project:
    def project(x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = torch.ops.paceline.project(x, index, width)
        return projected

    return project


def _example(several: bool, device: torch.device) -> list[torch.Tensor]:
    """Return token ids, their positions and the rows to keep."""
    if not several:
        return [torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1, 1), (1, 1), (1,))]
    inputs = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1, 3), (1, 3), (2,))]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
    return inputs


def _compile(forward: Callable[..., torch.Tensor], example: list[torch.Tensor], several: bool) -> Graph:
    # A copy: torch takes out what it has read.
    options = dict(_OPTIONS)
    compiled: Any = torch.compile(forward, fullgraph=True, dynamic=None if several else False, options=options)
    # Unlike a call, this never compiles again behind a pass's back.
    graph: Graph = compiled.aot_compile((tuple(example), {}))
    return graph
