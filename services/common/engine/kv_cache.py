"""Keys and values of one sequence in buffers reserved once: appended in place, cropped by forgetting a length."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)


class _BufferLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, [1, heads, capacity, head_dim] each.

    `keys` and `values` are views of what is filled. A sliding-window layer keeps all of its past: the mask hides what
    is outside the window, and a crop can then bring it back.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # In the dtype and on the device of the first keys: a device map may put each layer elsewhere.
        self._all_keys = key_states.new_empty((*key_states.shape[:2], self._capacity, key_states.shape[3]))
        self._all_values = value_states.new_empty((*value_states.shape[:2], self._capacity, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self._length, key_states.shape[2]
        # narrow() raises past the capacity, where a slice would be cut short without a word.
        self._all_keys.narrow(2, start, count).copy_(key_states)
        self._all_values.narrow(2, start, count).copy_(value_states)
        return self.set_length(start + count)

    def set_length(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill or forget up to `length` positions."""
        self._length = length
        self.keys, self.values = self._all_keys.narrow(2, 0, length), self._all_values.narrow(2, 0, length)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._capacity


def unsupported_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of this model's cache layers that cannot be cropped, empty where all is well.

    Args:
        config: Of the model's decoder.
    """
    croppable = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as unknown:
        return {str(unknown.args[0])}
    return {type(layer).__name__ for layer in layers if type(layer) not in croppable}


class KvCache(Cache):
    """The cache of one sequence of at most `capacity` tokens. The memory is taken when a layer is first used."""

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        # Layers that use another layer's keys have none of their own.
        layers: list[Any] = [
            layer if isinstance(layer, DummyLayer) else _BufferLayer(capacity)
            for layer in DynamicCache(config=config).layers
        ]
        super().__init__(layers=layers)

    def crop_to(self, length: int) -> None:
        """Forget all but the first `length` positions, in constant time.

        Each layer by itself: a pass that failed half-way has left some of them longer than others.
        """
        for layer in self.layers:
            if isinstance(layer, _BufferLayer) and layer.get_seq_length() != length:
                layer.set_length(length)
