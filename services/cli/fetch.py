"""`paceline fetch`: a model on disk before a worker starts, for pods whose workers reach no network."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import click

from services.common.specdec.errors import StartupError

# What transformers reads. Repositories often hold the weights again, in formats that it does not need.
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_SEVERAL = ["original/*", "onnx/*"]


@click.command()
@click.argument("model")
def fetch(model: str) -> None:
    """Put a model into $PACELINE_HOME/models and print its folder, which --model of a worker takes.

    MODEL is `default` or a hub id, ORG/NAME or ORG/NAME@REVISION. What is there already is not fetched again, and what
    was broken off is gone on with. A gated model needs HF_TOKEN.
    """
    if importlib.util.find_spec("transformers") is None:
        raise click.ClickException("fetch needs torch and transformers: pip install 'paceline[worker]'")
    from services.common.engine.default_model import ensure_default_model, paceline_home

    try:
        if model == "default":
            folder = ensure_default_model(paceline_home(), lambda line: click.echo(line, err=True))
        else:
            folder = _from_hub(model, paceline_home() / "models")
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    click.echo(folder)


def _from_hub(model: str, models: Path) -> Path:
    """Fetch a repository's files into a folder of its name.

    Raises:
        StartupError: They cannot be had or not be kept.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = model.partition("@")
    if name.count("/") != 1 or not all(name.split("/")) or ".." in name:
        raise StartupError(f"MODEL is {model!r}: must be `default`, ORG/NAME or ORG/NAME@REVISION")
    folder = models / name.split("/")[1]
    _claim(folder, f"{name}@{revision or 'main'}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    click.echo(f"Fetching {model} into {folder}", err=True)
    try:
        snapshot_download(
            name, revision=revision or None, local_dir=folder, allow_patterns=_FILES, ignore_patterns=_SEVERAL
        )
    except Exception as error:
        # No network, no such model, no right to it, a full disk: these errors have no common base.
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise StartupError(f"{model} could not be fetched into {folder}: {reason}") from error
    if not (folder / "config.json").is_file():
        raise StartupError(f"{model} has no config.json: a model for transformers has")
    _require_weights(folder, model)
    return folder


def _claim(folder: Path, model: str) -> None:
    """Make the folder this model's: files of two models in one would be read as one.

    Raises:
        StartupError: It is another's already, or cannot be made.
    """
    from services.common.engine.default_model import NAME

    if folder.name == NAME:
        raise StartupError(f"{model} would be in the folder of the default model, {folder}: fetch `default`")
    # Beside the folder and not in it: a folder that is there is taken for a model when the hub is out of reach.
    source = folder.parent / f".{folder.name}.source"
    try:
        there = source.read_text() if source.is_file() else "something else"
        if folder.exists() and there != model:
            raise StartupError(f"{model} cannot be fetched into {folder}: it holds {there}. Move that away first")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(model)
    except OSError as error:
        raise StartupError(f"{model} could not be fetched into {folder}: {error.strerror}") from error


def _require_weights(folder: Path, model: str) -> None:
    """Check that all files of weights are there: unreachable, a hub is not asked and what there is passes for all.

    Raises:
        StartupError: They are not.
    """
    index = folder / "model.safetensors.index.json"
    wanted = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing or not any(folder.glob("*.safetensors")):
        what = missing[0] if missing else "*.safetensors"
        raise StartupError(f"{model} is not whole in {folder}: there is no {what}. Run it again with the hub in reach")
