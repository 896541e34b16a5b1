"""The target's hidden states at every cached position, kept beside its keys and values for a draft fed with them.

A feature is what several layers put out at one position, side by side. Hooks write them to the places of the pass as
the model computes them, so they live, are reused and are forgotten with the keys and values of the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.common.engine.draft_model import layer_list
from services.common.specdec.errors import StartupError

_DTYPE = torch.bfloat16


class FeaturePool:
    """The features of `size` places.

    Attributes:
        layers: How many of the model's layers have been applied, ascending; all of them: after the final norm too.
        width: Numbers in a feature.
        keep: Takes a part's hidden states, [1, tokens, hidden], and its number as the pass computes them.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        """Hook the model.

        Raises:
            StartupError: It has no such layers.
        """
        config = model.config.get_text_config(decoder=True)
        count, hidden = int(config.num_hidden_layers), int(config.hidden_size)
        if sorted(set(layers)) != list(layers) or not all(1 <= layer <= count for layer in layers):
            raise StartupError(f"--features is {','.join(map(str, layers))}: must be ascending numbers of 1 to {count}")
        self.layers = tuple(layers)
        self.width = hidden * len(layers)
        self.keep: Callable[[torch.Tensor, int], torch.Tensor] = self.write
        self._hidden = hidden
        self._places: torch.Tensor | None = None
        self._pool = torch.empty((0, self.width), dtype=_DTYPE)
        try:
            blocks = layer_list(model.base_model, count)
        except ValueError as error:
            raise StartupError(f"--features is {','.join(map(str, layers))}: must be none here, {error}") from error
        for part, layer in enumerate(layers):
            # The last one is not the last layer's own: the final norm comes after that.
            module = model.base_model if layer == count else blocks[layer - 1]
            module.register_forward_hook(self._hook(part))

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        return self.width * int(_DTYPE.itemsize)

    def allocate(self, size: int, device: torch.device) -> None:
        """Make room for `size` tokens."""
        self._pool = torch.zeros((size, self.width), dtype=_DTYPE, device=device)

    def write_to(self, places: torch.Tensor) -> None:
        """Set where the features of the next pass go: int64[tokens]."""
        self._places = places.to(self._pool.device)

    def write(self, states: torch.Tensor, part: int) -> torch.Tensor:
        """Write one part of the pass's features, [1, tokens, hidden]; return what came."""
        if self._places is not None:
            columns = self._pool[:, part * self._hidden : (part + 1) * self._hidden]
            columns.index_copy_(0, self._places, states[0].to(columns.device, _DTYPE))
        return states

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the features of `length` places; the ranges do not overlap."""
        self._pool[target : target + length] = self._pool[source : source + length]

    def read(self, start: int, end: int) -> bytes:
        """Return the features of these places: bfloat16, little endian, [end - start, width]."""
        return self._pool[start:end].cpu().view(torch.int16).numpy().astype("<i2", copy=False).tobytes()

    def _hook(self, part: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            # Of a whole model its last hidden state is the first; older layers put out a tuple too.
            states = output if isinstance(output, torch.Tensor) else output[0]
            kept = self.keep(states, part)
            return None if kept is states else _replaced(output, kept)

        return hook


def _replaced(output: Any, states: torch.Tensor) -> Any:
    """Return a module's output with other hidden states in it."""
    if isinstance(output, torch.Tensor):
        return states
    if isinstance(output, tuple):
        return (states, *output[1:])
    output.last_hidden_state = states
    return output
