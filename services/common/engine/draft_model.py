"""A small draft for one target: a few of its layers, its embeddings, and a head over the tokens that it really writes.

    x_i = J [ norm(E t_i) ; norm(s_i) ]        s_i: what is known of the target's state at position i - 1
    a_i = body(x_1 .. x_i)                     q_(i+1) = softmax(H a_i)

In the manner of EAGLE (Li et al. 2024, arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): where the target's hidden
states f_(i-1) are known, s_i = F f_(i-1); past them s_i = a_(i-1), its own. A draft without features has x_i = E t_i.
E and H are the target's own, and are read from the target; H has the rows of `head_ids` only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from services.common.engine.model import keep_layers

CONFIG_FILE = "draft_config.json"
WEIGHTS_FILE = "draft.safetensors"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft is made of.

    Attributes:
        target: Name of the target.
        tokenizer_fingerprint: Of the target; a draft serves no other vocabulary.
        layers: Which of the target's layers it began as.
        feature_layers: How many of the target's layers have been applied where its states are taken, ascending; empty
            for a draft that sees tokens alone.
        window: Positions that it is trained to look back on.
    """

    target: str
    tokenizer_fingerprint: str
    layers: tuple[int, ...]
    feature_layers: tuple[int, ...] = ()
    window: int = 352

    @classmethod
    def read(cls, folder: Path) -> DraftConfig:
        """Read the configuration of a saved draft."""
        values: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


class Join(nn.Module):
    """J [ norm(e) ; norm(s) ]: a token's embedding and the state before it, as the input of the first layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(hidden)
        self.state_norm = nn.RMSNorm(hidden)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the joined input: [..., hidden]."""
        # Under autocast F's states come in bfloat16 while the norm's weights stay float32.
        states = self.state_norm(states.to(self.state_norm.weight.dtype))
        joined = torch.cat([self.embedding_norm(embeddings), states], dim=-1)
        return self.projection(joined)  # type: ignore[no-any-return]


class DraftModel(nn.Module):
    """The trained part of a draft, and the target's parts that it uses.

    Attributes:
        config: What it is made of.
        body: The layers and the final norm, a transformers model without embeddings of its own.
        fuse: F, from the target's states at one position to one vector; None for a draft without features.
        join: J; None for a draft without features.
        head_ids: int64[head], ascending: the tokens that it can propose.
    """

    head_ids: torch.Tensor

    def __init__(
        self,
        config: DraftConfig,
        target: PreTrainedModel,
        head_ids: torch.Tensor,
        body: PreTrainedModel | None = None,
    ) -> None:
        """Start from the target's own layers, or from others.

        Args:
            config: What to make.
            target: The target; its embeddings and head are shared, not copied.
            head_ids: int64[head], ascending.
            body: The layers and the final norm; None copies the target's.
        """
        super().__init__()
        self.config = config
        self.body = _copied_body(target, config.layers) if body is None else body
        hidden = target.config.get_text_config(decoder=True).hidden_size
        self.fuse: nn.Linear | None = None
        self.join: Join | None = None
        if config.feature_layers:
            self.fuse = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
            self.join = Join(hidden)
            _start_as_identity(self.fuse, self.join)
        self.register_buffer("head_ids", head_ids, persistent=True)
        # Not modules of this one: they are the target's.
        self._embedding = [target.get_input_embeddings()]
        head: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._head = [head.weight.detach()[head_ids].clone()]
        # Not the buffers: in bfloat16 the frequencies of rotations would be off by up to half a radian over a window.
        for weight in self.parameters():
            weight.data = weight.data.to(target.dtype)

    @property
    def head(self) -> torch.Tensor:
        """The target's head, the rows of `head_ids`: [head, hidden]."""
        head: torch.Tensor = self._head[0]
        return head

    @property
    def embeddings(self) -> nn.Module:
        """The target's embeddings."""
        embedding: nn.Module = self._embedding[0]
        return embedding

    def embed(self, tokens: torch.Tensor, states: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input of the first layer.

        Args:
            tokens: int64[..., positions].
            states: s, [..., positions, hidden]; not for a draft without features.
        """
        embeddings: torch.Tensor = self._embedding[0](tokens)
        if self.join is not None and states is not None:
            embeddings = self.join(embeddings, states)
        return embeddings

    def save(self, folder: Path) -> None:
        """Write the configuration and the trained part, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: _saved(tensor) for name, tensor in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, target: PreTrainedModel, decoder: PreTrainedConfig | None = None) -> DraftModel:
        """Read a saved draft.

        Args:
            folder: Where it was saved.
            target: The target, or as much of it as has its embeddings and its head.
            decoder: Configuration of the target's decoder with all of its layers; None where `target` has them all.
        """
        config, weights = DraftConfig.read(folder), load_file(folder / WEIGHTS_FILE)
        body = _body(decoder or target.config.get_text_config(decoder=True), config.layers)
        model = cls(config, target, weights["head_ids"].long(), body)
        model.load_state_dict(weights)
        return model


def default_feature_layers(target_layers: int) -> tuple[int, ...]:
    """Return after how many layers the states are taken: a quarter, half, three quarters, all of them."""
    return tuple(sorted({max(1, target_layers * part // 4) for part in (1, 2, 3, 4)}))


def _body(decoder: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedModel:
    """Return a decoder with these of its layers and without embeddings, its weights still to be filled in."""
    config: PreTrainedConfig = type(decoder).from_dict(decoder.to_dict())
    keep_layers(config, layers)
    config._attn_implementation = "sdpa"
    body: Any = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    body.set_input_embeddings(nn.Identity())
    return body  # type: ignore[no-any-return]


def _copied_body(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Return the target's decoder with these of its layers, their weights copied."""
    decoder = target.config.get_text_config(decoder=True)
    body = _body(decoder, layers)
    whole: Any = target.base_model
    path = _layers_path(whole, decoder.num_hidden_layers)
    source = whole.state_dict()
    chosen = {}
    for name in body.state_dict():
        if name.startswith(f"{path}."):
            index, rest = name.removeprefix(f"{path}.").split(".", 1)
            chosen[name] = source[f"{path}.{layers[int(index)]}.{rest}"]
        else:
            chosen[name] = source[name]
    body.load_state_dict(chosen)
    return body


def layer_list(model: nn.Module, count: int) -> nn.ModuleList:
    """Return a decoder's layers.

    Raises:
        ValueError: There is no list of so many.
    """
    layers = model.get_submodule(_layers_path(model, count))
    assert isinstance(layers, nn.ModuleList)
    return layers


def _layers_path(model: nn.Module, count: int) -> str:
    """Return the name of the list of layers."""
    lists = (
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    )
    name: str | None = next(lists, None)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no list of {count} layers")
    return name


def _start_as_identity(fuse: nn.Linear, join: Join) -> None:
    """Begin with the state of the last layer alone, and with embedding and state added up."""
    hidden = fuse.out_features
    with torch.no_grad():
        nn.init.normal_(fuse.weight, std=0.002)
        fuse.weight[:, -hidden:] += torch.eye(hidden)
        nn.init.normal_(join.projection.weight, std=0.002)
        join.projection.weight[:, :hidden] += torch.eye(hidden)
        join.projection.weight[:, hidden:] += torch.eye(hidden)


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor.to(torch.int32)).contiguous()
