"""Check what can be checked without a cluster or a Docker engine; `make lint` calls this.

Builds the base, every overlay, and the base with each component; validates each object strictly against the schemas of
several Kubernetes versions, custom ones against their own definitions; has checkov look for weak spots; and lints every
Dockerfile. Prints one line a check, and what is wrong; exits 1 if anything is.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

Document = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "deploy" / "k8s"
TOOLS = ROOT / ".venv-deploy" / "bin"
"""checkov and the definitions of custom resources: `make lint` installs them."""
OLDEST, NEWEST = 30, 37
"""Kubernetes 1.30 to 1.37."""
CUSTOM = {"cert-manager.io/v1", "keda.sh/v1alpha1", "monitoring.coreos.com/v1"}
"""Kinds that Kubernetes itself does not have."""


class BuildError(Exception):
    """A folder that `kubectl kustomize` cannot build; the message is kubectl's."""


def main() -> int:
    """Run all checks, as many at a time as there are cores, and return the exit status."""
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        building = {name: pool.submit(build, name) for name in kustomizations()}
        built: dict[str, list[Document]] = {}
        for name, documents in building.items():
            try:
                built[name] = documents.result()
            except BuildError as error:
                failed |= _tell(f"kustomize {name}", [str(error)])
        everything = [document for documents in built.values() for document in documents]
        running = {
            "checkov": pool.submit(checkov_faults, built),
            "definitions of custom resources": pool.submit(custom_faults, everything),
            f"schemas of 1.{OLDEST} to 1.{NEWEST}: {', '.join(built)}": pool.submit(list, schema_faults(everything)),
            **{f"hadolint {p.relative_to(ROOT)}": pool.submit(dockerfile_faults, p) for p in dockerfiles()},
        }
        for check, found in running.items():
            failed |= _tell(check, found.result())
    return int(failed)


def _tell(check: str, found: list[str]) -> bool:
    """Print a check and what it found; return whether that is anything."""
    sys.stdout.write("\n  ".join([f"{'FAILED' if found else 'ok    '} {check}", *found]) + "\n")
    return bool(found)


def kustomizations() -> list[str]:
    """Return the folders below deploy/k8s that can be built, a component meaning the base with it."""
    found = {path.parent.relative_to(K8S).as_posix() for path in K8S.rglob("kustomization.yaml")}
    # It is the namespace alone, and overlays have it.
    return sorted(found - {"components/namespace"})


def dockerfiles() -> list[Path]:
    """Return the services' Dockerfiles."""
    return sorted(ROOT.glob("services/*/Dockerfile"))


def build(name: str) -> list[Document]:
    """Return the objects of a kustomization.

    Raises:
        BuildError: kubectl cannot build it.
    """
    folder = K8S / name
    if not name.startswith("components/"):
        return kustomize(folder)
    with tempfile.TemporaryDirectory() as temporary:
        # kustomize takes folders by relative paths only.
        base, component = (os.path.relpath(path, Path(temporary).resolve()) for path in (K8S / "base", folder))
        text = yaml.safe_dump({"namespace": "paceline", "resources": [base], "components": [component]})
        (Path(temporary) / "kustomization.yaml").write_text(text)
        return kustomize(Path(temporary))


def kustomize(folder: Path) -> list[Document]:
    """Return the objects of a folder with a kustomization.

    Raises:
        BuildError: kubectl cannot build it.
    """
    done = _run(_tool("kubectl"), "kustomize", folder)
    if done.returncode:
        raise BuildError(done.stderr.strip())
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def schema_faults(documents: Iterable[Document]) -> Iterator[str]:
    """Yield what is wrong with objects of kinds that Kubernetes has; most are in several kustomizations, told once."""
    for text in sorted({json.dumps(document) for document in documents if document["apiVersion"] not in CUSTOM}):
        document = json.loads(text)
        # One line a fault, with the versions it concerns: most concern them all.
        faults: dict[str, list[str]] = {}
        for minor in range(OLDEST, NEWEST + 1):
            if fault := _schema_fault(document, f"1.{minor}"):
                faults.setdefault(fault, []).append(f"1.{minor}")
        for fault, versions in faults.items():
            yield f"{document['kind']} {document['metadata']['name']}, {fault} ({' '.join(versions)})"


def custom_faults(documents: Iterable[Document]) -> list[str]:
    """Return what is wrong with objects of other kinds."""
    custom = [document for document in documents if document["apiVersion"] in CUSTOM]
    script = Path(__file__).with_name("custom_resources.py")
    done = _run(_tool("python", TOOLS), script, given=json.dumps(custom))
    return (done.stdout + done.stderr).splitlines()


def checkov_faults(built: Mapping[str, list[Document]]) -> list[str]:
    """Return what checkov has to say about manifests, as they are applied, and about Dockerfiles."""
    with tempfile.TemporaryDirectory() as temporary:
        for name, documents in built.items():
            # The base alone has no namespace, and is nothing to apply.
            if name != "base":
                (Path(temporary) / f"{name.replace('/', '-')}.yaml").write_text(yaml.safe_dump_all(documents))
        for path in dockerfiles():
            shutil.copy(path, Path(temporary) / f"{path.parent.name}.Dockerfile")
        arguments = ("--config-file", Path(__file__).with_name("checkov.yaml"), "-d", temporary)
        done = _run(_tool("checkov", TOOLS), *arguments, "--framework", "kubernetes", "dockerfile")
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def dockerfile_faults(path: Path) -> list[str]:
    """Return what hadolint has to say about a Dockerfile."""
    done = _run(_tool("hadolint"), "--no-color", path)
    return (done.stdout + done.stderr).splitlines() if done.returncode else []


def _schema_fault(document: Document, version: str) -> str | None:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return f"{document['apiVersion']}: there is no such kind"
    return None


def _run(*command: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)  # noqa: S603


def _tool(name: str, folder: Path | None = None) -> str:
    """Return a program's path: the one beside this Python, whose version is pinned, else one on the PATH."""
    beside = (folder or Path(sys.executable).parent) / name
    found = str(beside) if beside.is_file() else shutil.which(name) if folder is None else None
    if not found:
        raise SystemExit(f"{name} is not in {beside.parent}: run `make lint`")
    return found


if __name__ == "__main__":
    sys.exit(main())
