"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "numpy")
# Those that matter to the speed of a forward pass.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


def machine() -> dict[str, Any]:
    """Return the processor, the memory and how busy they are."""
    info = _cpu_info()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": info.get("model name", platform.processor()),
        "cpu_flags": [flag for flag in _FLAGS if flag in info.get("flags", "").split()],
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch_threads": torch.get_num_threads(),
        "load_before": [round(load, 2) for load in psutil.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def commit() -> str:
    """Return the commit that is checked out, with `+` where files differ from it; empty outside of a repository."""
    found = _git("rev-parse", "--short=12", "HEAD")
    return found + "+" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_info() -> dict[str, str]:
    """Return the first processor's entries of /proc/cpuinfo, empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
