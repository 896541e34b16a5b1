"""Compiled graphs kept on disk: a worker that starts again loads in seconds what took a minute to compile.

A graph is found again by what it was made from: weights, configuration and code of the model, the code of this package
and of transformers, torch and its settings, the device. Its file is code that is run, as the files of torch's own cache
are, among which it lies.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

log = logging.getLogger(__name__)

Graph = Callable[..., torch.Tensor]

# A graph refers to the model's weights. One that has them in it all the same, as constants, is not kept.
_MOST_BYTES = 64 * 2**20
_MODEL = "model"
_SUFFIX = ".graph"


class SavedGraphs:
    """The graphs of one model, by name. None of its methods raises: without a file a graph is compiled."""

    def __init__(self, folder: Path, model: nn.Module, made_from: Mapping[str, object]) -> None:
        """Look for them in a folder.

        Args:
            folder: Of all models' graphs.
            model: Whose weights the graphs refer to.
            made_from: What they follow from, besides code, torch and device: values that JSON can hold.
        """
        self._weights: dict[str, Any] = {_MODEL: model}
        self._folder: Path | None = None
        try:
            described = {**made_from, "code": _code(model), "machine": _machine(model)}
            self._folder = folder / hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
        # A model's code may be in no file, and a device may not tell its name.
        except Exception as error:
            log.info("compiled graphs are not kept: %s: %s", type(error).__name__, error)

    def load(self, name: str, scope: dict[str, object]) -> Graph | None:
        """Return a graph that was saved, None where there is none that can be used.

        Args:
            name: Of the graph.
            scope: Globals of the function that it was compiled from.
        """
        if self._folder is None:
            return None
        path = self._folder / f"{name}{_SUFFIX}"
        try:
            with path.open("rb") as file:
                graph: Graph = torch.compiler.load_compiled_function(file, f_globals=scope, external_data=self._weights)
        except FileNotFoundError:
            return None
        # A file that was cut short or a compiler that is gone: all kinds of exceptions, and no graph is worth a start.
        except Exception as error:
            log.info("the saved graph %s cannot be used: %s: %s", path, type(error).__name__, error)
            return None
        return graph

    def save(self, name: str, graph: Any) -> None:
        """Save a graph, as a whole or not at all; where that cannot be, the next start compiles again."""
        if self._folder is None:
            return
        try:
            data = type(graph).serialize(graph, self._weights).serialized_data
            if len(data) > _MOST_BYTES:
                log.info("the compiled graph is not kept: it is of %d MiB", len(data) >> 20)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._folder / f"{name}{_SUFFIX}", data)
        # What a graph refers to may be of a kind that cannot be saved, and the method is a young one of torch.
        except Exception as error:
            log.info("the compiled graph is not kept: %s: %s", type(error).__name__, error)

    def drop(self) -> None:
        """Remove them: they are not what they should be."""
        for path in self._folder.glob(f"*{_SUFFIX}") if self._folder is not None else ():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", path, error)


def _write(path: Path, data: bytes) -> None:
    partial = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".partial", delete=False)  # noqa: SIM115 - renamed
    try:
        with partial:
            partial.write(data)
        Path(partial.name).replace(path)
    except BaseException:
        Path(partial.name).unlink(missing_ok=True)
        raise


def _code(model: nn.Module) -> list[str]:
    """Return hashes of the code that a graph is made from and calls: this package's, transformers', the model's own."""
    library = Path(transformers.__file__).parent
    files = [*Path(__file__).parent.glob("*.py"), *library.glob("*.py"), *library.glob("integrations/*.py")]
    files += {Path(inspect.getfile(type(module))) for module in model.modules()}
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)]


def _machine(model: nn.Module) -> dict[str, object]:
    """Return what compiled code depends on besides what it was made from."""
    try:
        known = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor = [line for line in known if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [platform.processor()]
    devices = sorted({str(weight.device) for weight in model.parameters()})
    return {
        "python": sys.version,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TORCHINDUCTOR_", "TORCHDYNAMO_")) and name != "TORCHINDUCTOR_CACHE_DIR"
        },
        "processor": processor,
        "devices": devices,
        "gpus": [torch.cuda.get_device_name(device) for device in devices if device.startswith("cuda")],
    }
