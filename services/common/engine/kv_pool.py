"""Keys and values of all sessions: one tensor each a layer, allocated at start, appended in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token.

    Attributes:
        heads: Key-value heads.
        key_dim: Numbers in a head's key.
        value_dim: Numbers in a head's value.
        dtype: Of both.
        device: Where the layer is.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def layer_shapes(cache: Cache) -> dict[int, LayerShape]:
    """Return what each layer keeps, by its index, from a library's cache that a forward has filled."""
    shapes = {}
    for index, layer in enumerate(cache.layers):
        # A layer that uses another one's keys has none of its own.
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            shapes[index] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
    return shapes


class KvPool(Cache):
    """Places for the keys and values of `size` tokens; a session's lie next to each other, so that a view is enough.

    Sliding-window layers keep all of the past too: attention looks at the window only, and a crop can then
    bring the rest back.

    Attributes:
        size: Tokens in all.
    """

    def __init__(self, shapes: dict[int, LayerShape], size: int) -> None:
        """Allocate the pool. On a CPU the memory becomes resident as it is first written.

        Args:
            shapes: Of each layer, by its index in the model.
            size: Tokens in all.
        """
        super().__init__(layers=[])
        self._keys = {i: _empty(s, s.key_dim, size) for i, s in shapes.items()}
        self._values = {i: _empty(s, s.value_dim, size) for i, s in shapes.items()}
        self.size = size
        self._places: dict[torch.device, torch.Tensor] = {}

    def write_to(self, places: torch.Tensor) -> None:
        """Set where the tokens of the next pass go: int64[tokens]."""
        self._places = {device: places.to(device) for device in {keys.device for keys in self._keys.values()}}

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of `length` places; the ranges do not overlap."""
        for tensors in (self._keys, self._values):
            for tensor in tensors.values():
                tensor.narrow(2, target, length).copy_(tensor.narrow(2, source, length))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's keys and values to their places; return the whole layer: [1, heads, size, dim] each."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        places = self._places[keys.device]
        keys.index_copy_(2, places, key_states)
        values.index_copy_(2, places, value_states)
        return keys, values

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        """Return 0: positions are told to the model, not found here."""
        return 0


def _empty(shape: LayerShape, dim: int, size: int) -> torch.Tensor:
    return torch.empty((1, shape.heads, size, dim), dtype=shape.dtype, device=shape.device)
