"""Enough of a Dockerfile's grammar to compare one with the code, and to run its build stage without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Instruction(NamedTuple):
    """One instruction, its continued lines joined."""

    name: str
    rest: str


def stages(path: Path) -> list[list[Instruction]]:
    """Return the instructions of each stage, FROM first; those before the first FROM are left out."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[Instruction]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(name, rest.strip()))
    return found


def only(stage: list[Instruction], name: str) -> str:
    """Return the rest of a stage's only instruction of that name."""
    (rest,) = (instruction.rest for instruction in stage if instruction.name == name)
    return rest


def environment(stage: list[Instruction]) -> dict[str, str]:
    """Return a stage's ENV."""
    words = " ".join(instruction.rest for instruction in stage if instruction.name == "ENV").split()
    return dict(word.split("=", 1) for word in words)


def sources(stage: list[Instruction]) -> list[str]:
    """Return what a stage copies out of the repository."""
    copies = [i.rest.split() for i in stage if i.name == "COPY" and not i.rest.startswith("--from")]
    return [word for copy in copies for word in copy[:-1]]


def run_stage(stage: list[Instruction], opt: Path, src: Path, offline: bool = False) -> None:
    """Do what a stage's COPY and RUN say, with `opt` for /opt and `src` for the working folder.

    Args:
        stage: The instructions.
        opt: Takes the place of /opt.
        src: Takes the place of the working folder.
        offline: Stop before the first RUN that needs the network, pip.
    """
    src.mkdir(parents=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, rest in stage:
        if name == "COPY":
            *copied, to = rest.split()
            for source in copied:
                _copy(ROOT / source, src / source if to.endswith("/") else src / to)
        elif name == "RUN":
            command = re.sub(r"--mount=\S+ ", "", rest).replace("/opt/", f"{opt}/")
            if offline and "pip install" in command:
                return
            done = subprocess.run(
                ["/bin/sh", "-ec", command],
                cwd=src,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, to)
