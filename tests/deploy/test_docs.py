"""docs/kubernetes.md names files, commands and flags that there are, and its example builds."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from deploy import check
from services.cli.main import main
from tests.deploy.contract import container_of

TEXT = (check.ROOT / "docs" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SHELL = "\n".join(block for language, block in BLOCKS if language == "sh").replace("\\\n", " ")


def test_paths_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    named = re.findall(r"(?:-k|-f) (deploy/\S+|services/\S+)", SHELL.replace("$service", "coordinator"))
    assert len(links) >= 5
    assert len(named) >= 6
    assert [link for link in links if not (check.ROOT / "docs" / link).exists()] == []
    assert [path for path in named if not (check.ROOT / path).exists()] == []


def test_what_is_applied_builds() -> None:
    applied = re.findall(r"kubectl apply -k deploy/k8s/(\S+)", SHELL)
    assert {"overlays/local", "overlays/trial", "overlays/gpu", "jaeger", "fetch-model"} <= set(applied)
    assert set(applied) <= set(check.kustomizations())


def test_commands_parse() -> None:
    commands = re.findall(r"\.venv/bin/paceline ([^>;\n]+)", SHELL)
    assert len(commands) >= 3
    for line in commands:
        name, *arguments = shlex.split(line)
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, arguments)


def test_components_are_all_told_of() -> None:
    told = set(re.findall(r"^\| `([\w-]+)` \|", TEXT, re.MULTILINE))
    there = {name.removeprefix("components/") for name in check.kustomizations() if name.startswith("components/")}
    assert told == there


def test_the_example_builds(tmp_path: Path) -> None:
    (example,) = (block for language, block in BLOCKS if language == "yaml")
    here = os.path.relpath(check.ROOT, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(example.replace("- paceline/", f"- {here}/"))
    documents = check.kustomize(tmp_path)
    (image,) = (entry for entry in yaml.safe_load(example)["images"])
    assert container_of(documents, "target-worker")["image"] == f"{image['newName']}@{image['digest']}"
    assert {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"} == {"paceline"}
    assert list(check.schema_faults(documents)) == []


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[\w-]+)`", TEXT))))
def test_flags_are_there(flag: str) -> None:
    commands = ("coordinator", "draft-worker", "target-worker", "generate")
    known = {
        option
        for name in commands
        if (command := main.get_command(click.Context(main), name)) is not None
        for parameter in command.params
        for option in parameter.opts
    }
    assert flag in known | {"--build-arg"}
