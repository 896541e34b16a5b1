"""Loads a causal language model of transformers, and what others need to know about it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from services.common.engine import identity
from services.common.engine.quiet import quiet_transformers
from services.common.specdec.errors import StartupError

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class ModelLoadError(StartupError):
    """A model that cannot be served; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which model to load, and how.

    Attributes:
        model: A local folder, a hub id, or a GGUF file.
        dtype: "auto" is bfloat16 where the device is good at it, else float32.
        device: A torch device; "auto" is cuda where there is one, else cpu.
        device_map: transformers' device map ("auto", "balanced", ...), instead of one device.
        threads: Of torch on the CPU; None is torch's choice.
    """

    model: str
    dtype: DtypeName = "auto"
    device: str = "auto"
    device_map: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        model: In eval mode, its weights frozen.
        config: Of the decoder, with all of its layers.
        forward_arguments: Names of the optional arguments that its forward takes.
        model_id: Folder name, hub id or file name.
        weights_hash: Of the weights after the cast to dtype.
        dtype: For example "bfloat16".
        vocab_size: Ids 0..vocab_size-1 exist; logits past them are padding.
        context_length: Longest sequence in tokens; 0 is no limit.
        eos_token_ids: Tokens that end an answer.
        tokenizer_json: tokenizer.json of the `tokenizers` library.
        chat_template: Jinja, empty where there is none.
        generation_config_json: What the model's author set in generation_config.json.
        special_tokens: "bos_token", "eos_token", "unk_token" and "pad_token", those that there are.
        tokenizer_fingerprint: Hash of the map from id to token.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    forward_arguments: frozenset[str]
    model_id: str
    weights_hash: str
    dtype: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    chat_template: str
    generation_config_json: str
    special_tokens: dict[str, str]
    tokenizer_fingerprint: str

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return weight.device


def load_model(options: LoadOptions, depth: int | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        options: Which, and how.
        depth: Of its layers read only the first so many, for who wants what lies around them; of a GGUF file all are
            read. None reads all.

    Raises:
        ModelLoadError: Files that are missing or wrong, or a kind of model that cannot be served.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    source, files = _source(options.model)
    with quiet_transformers():
        config = _attempt(options.model, "configuration", lambda: AutoConfig.from_pretrained(source, **files))
        _refuse_unsupported(options.model, config)
        tokenizer = _attempt(options.model, "tokenizer", lambda: AutoTokenizer.from_pretrained(source, **files))
        if not tokenizer.is_fast:
            raise ModelLoadError(f"{options.model} has no fast tokenizer (tokenizer.json), which the coordinator needs")
        arguments: dict[str, Any] = {**files}
        if depth is not None and not files:
            arguments["config"] = _shallow(config, depth)
        model = _load_weights(options, source, arguments)
    decoder = (config if "config" in arguments else model.config).get_text_config(decoder=True)
    return _describe(options.model, source, files, model, decoder, tokenizer)


def keep_layers(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Make a decoder's configuration that of a model that has these of its layers alone."""
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]


def _shallow(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    shallow = copy.deepcopy(config)
    keep_layers(shallow.get_text_config(decoder=True), range(depth))
    return shallow


def _source(model: str) -> tuple[str, dict[str, str]]:
    """Return what transformers calls the model's name or path, and the argument that names a GGUF file in it."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json: it is not a folder of a transformers model")
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
            raise ModelLoadError(f"{path} has no weights (*.safetensors)")
        return str(path), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"There is no file {path}")
        return str(path.parent), {"gguf_file": path.name}
    # A hub id has at most one slash and does not start with a dot.
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelLoadError(f"There is no folder {path}")
    return model, {}


def _attempt(model: str, part: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        # Wrong files make the loaders raise all kinds of exceptions; the first line says what it was.
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        where = "" if Path(model).expanduser().exists() else " (a hub id: no folder here has this name)"
        raise ModelLoadError(f"The {part} of {model}{where} cannot be loaded: {reason}") from error


def _refuse_unsupported(model: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{model} is an encoder-decoder model ({config.model_type}): only decoders can be served")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelLoadError(f"{model} is no causal language model ({config.model_type})")
    kinds = _unsupported_layers(config.get_text_config(decoder=True))
    if kinds or getattr(model_class, "_is_stateful", False):
        raise ModelLoadError(
            f"{model} ({config.model_type}) has layers that cannot be served "
            f"({', '.join(sorted(kinds)) or 'recurrent states'}): only full and sliding-window attention can"
        )


def _unsupported_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of a decoder's layers that are no attention over all of the past or a window of it."""
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as unknown:
        return {str(unknown.args[0])}
    # Its cache is that of a sliding window, its mask is not.
    kinds = {"chunked_attention"} & set(getattr(config, "layer_types", None) or ())
    # A dummy layer uses another layer's keys.
    served = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return kinds | {type(layer).__name__ for layer in layers if type(layer) not in served}


def _load_weights(options: LoadOptions, source: str, arguments: dict[str, Any]) -> PreTrainedModel:
    if options.device_map is not None:
        arguments = {**arguments, "device_map": options.device_map}
    device = _device(options.device)
    dtype = _dtype(options.dtype, device)

    def load() -> tuple[PreTrainedModel, dict[str, Any]]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **arguments)
        model, info = loaded
        return model if options.device_map is not None else model.to(device), info

    model: PreTrainedModel
    model, info = _attempt(options.model, "weights", load)
    if missing := sorted(info["missing_keys"]):
        # transformers would serve random numbers in their place.
        raise ModelLoadError(f"{options.model} lacks {len(missing)} of its weights, {missing[0]} among them")
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ModelLoadError(
            f"device_map {options.device_map!r} leaves weights off the devices: there is too little memory"
        )
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(requires_grad=False)
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device is {name!r}: must be auto, cpu, cuda, cuda:1, ...") from error


def _dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    # Private names of torch: absent ones count as no.
    checks = (getattr(torch.cpu, check, None) for check in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    fast = device.type == "cpu" and any(check is not None and check() for check in checks)
    return torch.bfloat16 if fast else torch.float32


def _describe(
    name: str, source: str, files: dict[str, str], model: PreTrainedModel, config: PreTrainedConfig, tokenizer: Any
) -> LoadedModel:
    author_json = identity.generation_config_json(source, files)
    token_ids = identity.token_map(tokenizer)
    path = Path(source, files.get("gguf_file", "")).expanduser()
    return LoadedModel(
        model=model,
        config=config,
        forward_arguments=frozenset(inspect.signature(model.forward).parameters),
        model_id=(path.stem if files else path.resolve().name) if path.exists() else name,
        weights_hash=identity.weights_hash(model),
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=min(_logit_width(model), max(token_ids.values()) + 1),
        context_length=_context_length(config),
        eos_token_ids=identity.eos_token_ids(model, tokenizer),
        tokenizer_json=identity.tokenizer_json(tokenizer),
        chat_template=identity.chat_template(tokenizer),
        generation_config_json=author_json,
        special_tokens=identity.special_tokens(tokenizer),
        tokenizer_fingerprint=identity.tokenizer_fingerprint(token_ids),
    )


def _logit_width(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = head.weight if head is not None else model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _context_length(config: PreTrainedConfig) -> int:
    # Past this length a "longrope" model changes the rotation of all positions, those in the cache included.
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and (original := rope.get("original_max_position_embeddings")):
        return int(original)
    # Most configurations map their own word for it to the first of these.
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(length := getattr(config, name, None), int):
            return length
    return 0
