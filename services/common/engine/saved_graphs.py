"""Compiled graphs kept on disk: a worker that starts again loads in seconds what took a minute to compile.

A graph is found again by all that it was made from: weights, configuration and code of the model, the code of this
package, torch, transformers, and the processor. Its file is code that is run, as the files of torch's own cache are,
among which it lies.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

log = logging.getLogger(__name__)

Graph = Callable[..., torch.Tensor]

# A graph refers to the model's weights. One with weights in it (of projections that are not packed) is not kept.
_MOST_BYTES = 64 * 2**20
_MODEL = "model"


class SavedGraphs:
    """The graphs of one model, by name."""

    def __init__(self, folder: Path, model: nn.Module, made_from: Mapping[str, object]) -> None:
        """Look for them in a folder.

        Args:
            folder: Of all models' graphs.
            model: Whose weights the graphs refer to.
            made_from: What they follow from, besides the code and the machine: values that JSON can hold.
        """
        described = {**made_from, "code": _code(model), "machine": _machine()}
        self._folder = folder / hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]
        self._weights: dict[str, Any] = {_MODEL: model}

    def load(self, name: str, scope: dict[str, object]) -> Graph | None:
        """Return a graph that was saved, None where there is none that can be used.

        Args:
            name: Of the graph.
            scope: Globals of the function that it was compiled from.
        """
        try:
            with self._path(name).open("rb") as file:
                graph: Graph = torch.compiler.load_compiled_function(
                    file,
                    f_globals=scope,
                    external_data=self._weights,
                )
        except FileNotFoundError:
            return None
        # A file that was cut short or a compiler that is gone: all kinds of exceptions, and no graph is worth a start.
        except Exception as error:
            log.info("the saved graph %s cannot be used: %s: %s", self._path(name), type(error).__name__, error)
            return None
        return graph

    def save(self, name: str, graph: Any) -> None:
        """Save a graph as a whole or not at all; where that cannot be, the next start compiles again."""
        try:
            data = type(graph).serialize(graph, self._weights).serialized_data
            if len(data) > _MOST_BYTES:
                log.info("the compiled graph is not kept: it is of %d MiB", len(data) >> 20)
                return
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(data)
            partial.replace(path)
        # What a graph refers to may be of a kind that cannot be saved, and the method is a young one of torch.
        except Exception as error:
            log.info("the compiled graph is not kept: %s: %s", type(error).__name__, error)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.graph"


def _code(model: nn.Module) -> list[str]:
    """Return hashes of the code that a graph is made from and calls: this package's, and the model's own."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    # Of a module of transformers its version says as much; a model may have brought its own.
    files += sorted({Path(inspect.getfile(type(module))) for module in model.modules()})
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _machine() -> dict[str, object]:
    """Return what compiled code depends on besides what it was made from."""
    try:
        known = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        processor = [line for line in known if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        processor = [platform.processor()]
    return {
        "python": sys.version,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
