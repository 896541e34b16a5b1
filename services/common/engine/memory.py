"""How much memory the KV pool may take."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

from services.common.specdec.errors import StartupError

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_memory(text: str) -> int | float:
    """Return bytes for "2GiB" or "800MB", a share from 0 to 1 for "25%".

    Raises:
        ValueError: It is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMG]i?B|)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("must be a size such as 2GiB or 800MB, or a share of the free memory such as 25%")
    number, unit = float(match[1]), match[2].upper()
    if unit != "%":
        return int(number * _UNITS[unit])
    if not 0 < number <= 100:
        raise ValueError("a share must be above 0% and at most 100%")
    return number / 100


def kv_budget(text: str, device: torch.device) -> int:
    """Return the bytes of a KV pool on a device.

    Raises:
        StartupError: Not that many are free, or it is no amount of memory.
    """
    try:
        wanted, free = parse_memory(text), free_memory(device)
    except ValueError as error:
        raise StartupError(f"--kv-cache-memory is {text}: {error}") from None
    if isinstance(wanted, float):
        return int(wanted * free)
    if wanted > free:
        raise StartupError(
            f"--kv-cache-memory is {text}: only {free / 2**20:.0f} MiB are free on {device} after loading the model"
        )
    return wanted


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, within the limit of this container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = int(psutil.virtual_memory().available)
    # Of control groups version 2; "max" is no limit. Pages of files, such as the weights' own, are given up on demand.
    limit, used = _number("memory.max"), _number("memory.current")
    if limit is None or used is None:
        return available
    return min(available, limit - used + (_number("memory.stat", "inactive_file ") or 0))


def _number(file: str, prefix: str = "") -> int | None:
    """Return the number that follows `prefix` at the beginning of a line, None where there is none."""
    try:
        lines = (_CONTROL_GROUP / file).read_text().splitlines()
        return int(next(line for line in lines if line.startswith(prefix)).removeprefix(prefix))
    except (OSError, ValueError, StopIteration):
        return None
