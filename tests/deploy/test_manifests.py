"""The manifests say what the code has, and a change of either alone is noticed."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import create_model

from deploy import check
from services.common.rpc.settings import Settings
from tests.deploy import dockerfile
from tests.deploy.contract import SERVICES, Document, Service, container_of, faults, get, pod_of, settings_of

BUILT = {folder.name: check.build(folder) for folder in check.folders()}
VERSION = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(params=BUILT)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return copy.deepcopy(BUILT[request.param])


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_base_and_overlays_are_there() -> None:
    assert {"base", "local", "own-models"} <= BUILT.keys()


def test_a_draft_worker_finds_draft_and_target_where_they_are_mounted() -> None:
    documents = BUILT["own-models"]
    draft = settings_of(container_of(documents, "draft-worker"), SERVICES["draft-worker"])
    target = settings_of(container_of(documents, "target-worker"), SERVICES["target-worker"])
    assert (draft.drafter, draft.target_model) == ("model", target.model)
    claim = get(documents, "PersistentVolumeClaim", "models")["metadata"]["name"]
    for name, folders in {"draft-worker": {draft.model, draft.target_model}, "target-worker": {target.model}}.items():
        (own,) = (v["name"] for v in pod_of(documents, name)["volumes"] if claim in str(v.get("persistentVolumeClaim")))
        mounts = {m["name"]: m["mountPath"] for m in container_of(documents, name)["volumeMounts"]}
        assert all(folder.startswith(f"{mounts[own]}/") for folder in folders)


def test_manifests_say_what_the_code_has(documents: list[Document]) -> None:
    assert faults(documents) == []


def test_schemas_and_dockerfiles_pass() -> None:
    assert [fault for folder in check.folders() for fault in check.manifest_faults(folder)] == []
    assert [fault for path in check.dockerfiles() for fault in check.dockerfile_faults(path)] == []


def used_fields() -> list[tuple[str, str]]:
    """Every (service, field) that the base or an overlay sets, by flag or by variable."""
    used = set()
    for built in BUILT.values():
        for name, service in SERVICES.items():
            container = container_of(built, name)
            said = {arg.split("=")[0] for arg in container["args"]} | {e["name"] for e in container["env"]}
            for field in service.settings.model_fields:
                if said & {service.settings.flag_name(field), service.settings.env_name(field)}:
                    used.add((name, field))
    return sorted(used)


@pytest.mark.parametrize(("name", "field"), used_fields())
def test_a_setting_renamed_in_the_code_is_noticed(name: str, field: str) -> None:
    old = SERVICES[name]
    fields: dict[str, Any] = {
        "renamed" if key == field else key: (info.annotation, info) for key, info in old.settings.model_fields.items()
    }
    renamed = create_model("Renamed", __base__=Settings, **fields)
    renamed.env_prefix = old.settings.env_prefix
    found = [fault for built in BUILT.values() for fault in faults(built, {name: Service(renamed, old.full_name)})]
    flag, variable = old.settings.flag_name(field), old.settings.env_name(field)
    assert any(flag in fault or variable in fault for fault in found), found


def _listen_elsewhere(documents: list[Document]) -> None:
    args = container_of(documents, "target-worker")["args"]
    args[:] = ["--listen=0.0.0.0:6000" if arg.startswith("--listen") else arg for arg in args]


def _set(path: str, value: object) -> Callable[[list[Document]], None]:
    """Return a change of one value, at Kind/name/key/key."""

    def change(documents: list[Document]) -> None:
        kind, name, *keys, last = path.split("/")
        at: Any = get(documents, kind, name)
        for key in keys:
            at = at[int(key) if key.isdigit() else key]
        at[int(last) if last.isdigit() else last] = value

    return change


TARGET = "Deployment/target-worker/spec/template/spec/containers/0"
PLANTED = {
    "a port moved": (_listen_elsewhere, "the process listens on 6000"),
    "a probe's port": (_set(f"{TARGET}/readinessProbe/grpc/port", 1), "readinessProbe asks port 1"),
    "a probe's service": (_set(f"{TARGET}/startupProbe/grpc/service", "paceline.v1.Target"), "the process serves"),
    "a Service's target": (_set("Service/target-worker/spec/ports/0/targetPort", "http"), "targetPort is http"),
    "a Service's port": (_set("Service/draft-worker/spec/ports/0/port", 80), "--draft is dns:///draft-worker:50051"),
    "too short a grace": (
        _set("Deployment/coordinator/spec/template/spec/terminationGracePeriodSeconds", 30),
        "terminationGracePeriodSeconds is 30",
    ),
    "an unknown flag": (_set(f"{TARGET}/args/1", "--drain-seconds=5"), "No such option"),
    "a refused value": (_set(f"{TARGET}/args/1", "--drain-s=-5"), "--drain-s"),
    "an unknown variable": (
        _set(f"{TARGET}/env/0", {"name": "PACELINE_TARGET_THREAD", "value": "2"}),
        "PACELINE_TARGET_THREAD is no setting",
    ),
    "loopback": (_set(f"{TARGET}/args/0", "--listen=127.0.0.1:50052"), "where no other pod gets"),
    "threads without cores": (_set(f"{TARGET}/resources/requests/cpu", "1"), "threads on a request of 1 cores"),
}


@pytest.mark.parametrize(("plant", "message"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found(
    documents: list[Document], plant: Callable[[list[Document]], None], message: str
) -> None:
    plant(documents)
    assert any(message in fault for fault in faults(documents)), faults(documents)


def test_pods_meet_the_restricted_standard(documents: list[Document], name: str) -> None:
    pod, container = pod_of(documents, name), container_of(documents, name)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_what_is_written_is_a_volume_and_the_user_is_the_images(documents: list[Document], name: str) -> None:
    pod, container = pod_of(documents, name), container_of(documents, name)
    final = dockerfile.stages(check.ROOT / "services" / name.replace("-", "_") / "Dockerfile")[-1]
    written = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
    mounts = {mount["mountPath"]: mount["name"] for mount in written}
    home = dockerfile.environment(final).get("PACELINE_HOME")
    assert mounts.keys() == {"/tmp", home} - {None}
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume and volume["emptyDir"]["sizeLimit"]}
    assert set(mounts.values()) == empty
    security = pod["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == dockerfile.only(final, "USER")
    assert container["image"] == f"paceline-{name}:{VERSION}"


def test_liveness_does_not_ask_for_health(documents: list[Document], name: str) -> None:
    """A loading or draining pod is NOT_SERVING and must not be killed for it."""
    container = container_of(documents, name)
    assert "tcpSocket" in container["livenessProbe"]
    assert "grpc" in container["readinessProbe"]


def test_services_select_their_pods(documents: list[Document], name: str) -> None:
    labels = get(documents, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
    service = get(documents, "Service", name)["spec"]
    assert service["selector"].items() <= labels.items()
    assert labels["app.kubernetes.io/component"] == name
    assert labels["app.kubernetes.io/version"] == VERSION
    assert "app.kubernetes.io/version" not in service["selector"], "a selector can never be changed"
    others = [pod["spec"]["template"]["metadata"]["labels"] for pod in documents if pod["kind"] == "Deployment"]
    assert sum(service["selector"].items() <= other.items() for other in others) == 1
    assert (service.get("clusterIP") == "None") == (name != "coordinator"), "workers are balanced by their callers"
