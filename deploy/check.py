"""Check what can be checked without a cluster or a Docker engine; `make lint` calls this.

Builds the base and every overlay, validates each object strictly against the schemas of several Kubernetes versions,
and lints every Dockerfile. Prints one line a check, and what is wrong; exits 1 if anything is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "deploy" / "k8s"
OLDEST, NEWEST = 30, 37
"""Kubernetes 1.30 to 1.37."""


class BuildError(Exception):
    """A folder that `kubectl kustomize` cannot build; the message is kubectl's."""


def main() -> int:
    """Run all checks and return the exit status."""
    checks = [
        (f"kustomize {folder.relative_to(ROOT)}, 1.{OLDEST} to 1.{NEWEST}", manifest_faults(folder))
        for folder in folders()
    ]
    checks += [(f"hadolint {path.relative_to(ROOT)}", dockerfile_faults(path)) for path in dockerfiles()]
    failed = False
    for name, faults in checks:
        found = list(faults)
        failed = failed or bool(found)
        sys.stdout.write("\n  ".join([f"{'FAILED' if found else 'ok    '} {name}", *found]) + "\n")
    return int(failed)


def folders() -> list[Path]:
    """Return the base and the overlays."""
    return [K8S / "base", *sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml"))]


def dockerfiles() -> list[Path]:
    """Return the services' Dockerfiles."""
    return sorted(ROOT.glob("services/*/Dockerfile"))


def build(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of a kustomization.

    Raises:
        BuildError: kubectl cannot build it.
    """
    done = subprocess.run([_tool("kubectl"), "kustomize", folder], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise BuildError(done.stderr.strip())
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def manifest_faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a kustomization's objects."""
    try:
        documents = build(folder)
    except BuildError as error:
        yield str(error)
        return
    for document in documents:
        # One line a fault, with the versions it concerns: most concern them all.
        faults: dict[str, list[str]] = {}
        for minor in range(OLDEST, NEWEST + 1):
            if fault := _schema_fault(document, f"1.{minor}"):
                faults.setdefault(fault, []).append(f"1.{minor}")
        for fault, versions in faults.items():
            yield f"{document['kind']} {document['metadata']['name']}, {fault} ({' '.join(versions)})"


def dockerfile_faults(path: Path) -> Iterator[str]:
    """Yield what hadolint has to say about a Dockerfile."""
    done = subprocess.run([_tool("hadolint"), "--no-color", path], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        yield from (done.stdout + done.stderr).splitlines()


def _schema_fault(document: dict[str, Any], version: str) -> str | None:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return f"{document['apiVersion']}: there is no such kind"
    return None


def _tool(name: str) -> str:
    """Return a program's path: the one beside this Python, whose version is pinned, else one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if not found:
        raise SystemExit(f"{name} is neither beside {sys.executable} nor on the PATH: run `make setup`")
    return found


if __name__ == "__main__":
    sys.exit(main())
