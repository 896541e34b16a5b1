"""What is loaded, what is told about it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from services.common.engine.model import LoadedModel, LoadOptions, ModelLoadError, load_model
from tests.support.models import BOS, CHAT_TEMPLATE, EOS, VOCAB, make_tiny_gpt2, make_tiny_llama, make_tokenizer


def load(folder: Path | str, dtype: str = "float32") -> LoadedModel:
    return load_model(LoadOptions(str(folder), dtype=dtype, device="cpu"))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny-llama", context=300)


def test_a_plain_folder(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.model_id == "tiny-llama"
    assert loaded.dtype == "float32"
    assert loaded.vocab_size == VOCAB
    assert loaded.context_length == 300
    assert loaded.eos_token_ids == (EOS,)
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json.decode())
    ids = tokenizer.encode("Süß: 12 ↦ 🚀").ids
    assert tokenizer.decode(ids) == "Süß: 12 ↦ 🚀"
    assert BOS not in ids


def test_another_architecture(tmp_path: Path) -> None:
    loaded = load(make_tiny_gpt2(tmp_path / "tiny-gpt2", context=77))
    assert loaded.context_length == 77


def test_the_hash_tells_weights_and_dtypes_apart(tmp_path: Path, folder: Path) -> None:
    again = load(shutil.copytree(folder, tmp_path / "copy"))
    assert load(folder).weights_hash == again.weights_hash
    others = {
        load(folder).weights_hash,
        load(folder, "bfloat16").weights_hash,
        load(make_tiny_llama(tmp_path / "other", seed=1)).weights_hash,
    }
    assert len(others) == 3


def test_the_fingerprint_tells_tokenizers_apart(tmp_path: Path, folder: Path) -> None:
    same = load(make_tiny_llama(tmp_path / "same", seed=1))
    assert same.tokenizer_fingerprint == load(folder).tokenizer_fingerprint
    other = make_tiny_llama(tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(other)
    assert load(other).tokenizer_fingerprint != same.tokenizer_fingerprint


def test_only_what_the_author_set(folder: Path) -> None:
    settings = {"temperature": 0.6, "eos_token_id": [1, 7], "_from_model_config": True, "transformers_version": "4.1"}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded = load(folder)
    assert json.loads(loaded.generation_config_json) == {"temperature": 0.6, "eos_token_id": [1, 7]}
    assert loaded.eos_token_ids == (1, 7)


def test_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    loaded = load(folder)
    assert loaded.generation_config_json == "{}"
    assert loaded.eos_token_ids == (EOS,)


def test_the_tokenizers_eos_where_nothing_else_has_one(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert load(folder).eos_token_ids == (EOS,)


def test_truncation_and_padding_of_a_saved_tokenizer_are_dropped(folder: Path) -> None:
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_str(load(folder).tokenizer_json.decode())
    assert len(tokenizer.encode("abcdefgh").ids) == 8
    assert len(tokenizer.encode("a").ids) == 1


def test_auto_dtype_is_bfloat16_where_the_cpu_is_good_at_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, avx, expected in ((True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx, raising=False)
        assert load(folder, "auto").dtype == expected
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert load(folder, "auto").dtype == "float32"


def test_a_device_map(folder: Path) -> None:
    loaded = load_model(LoadOptions(str(folder), device_map="cpu"))
    assert loaded.device.type == "cpu"


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder)
    assert capfd.readouterr() == ("", "")


def refused(model: Path | str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(model)
    return str(caught.value)


def test_missing_files_are_named(tmp_path: Path, folder: Path) -> None:
    assert refused(tmp_path / "nowhere") == f"There is no folder {tmp_path / 'nowhere'}"
    assert refused(tmp_path / "model.gguf") == f"There is no file {tmp_path / 'model.gguf'}"
    assert "no config.json" in refused(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no weights (*.safetensors)" in refused(folder)


def test_a_hub_id_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect\nCheck your connection")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    assert refused("some/model") == (
        "The configuration of some/model (a hub id: no folder here has this name) cannot be loaded: We couldn't connect"
    )


def test_a_missing_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert f"The tokenizer of {folder} cannot be loaded" in refused(folder)


def test_damaged_files(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"The weights of {folder} cannot be loaded" in refused(folder)
    (folder / "config.json").write_text("{")
    assert f"The configuration of {folder} cannot be loaded" in refused(folder)


def test_weights_that_lack_a_tensor_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "lacks 1 of its weights, model.layers.1.mlp.up_proj.weight among them" in refused(folder)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert "encoder-decoder model (t5)" in refused(tmp_path)


def test_a_cache_that_cannot_be_cropped_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert refused(tmp_path) == (
        f"{tmp_path} (mamba) has layers that cannot be served (LinearAttentionLayer): "
        "only full and sliding-window attention can"
    )


def test_a_slow_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ByT5Tokenizer().save_pretrained(folder)
    assert "no fast tokenizer" in refused(folder)


def test_an_unknown_device_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="device is 'gpu9': must be auto, cpu, cuda"):
        load_model(LoadOptions(str(folder), device="gpu9"))
