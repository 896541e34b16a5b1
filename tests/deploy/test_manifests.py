"""The manifests say what the code has, and a change of either alone is noticed."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import create_model

from deploy import check
from services.common.rpc.probes import ALIVE, READY
from services.common.rpc.settings import Settings
from tests.deploy import dockerfile
from tests.deploy.contract import (
    SERVICES,
    Document,
    Service,
    built,
    command_faults,
    container_of,
    faults,
    get,
    pod_of,
    settings_of,
)

PODS = {"Deployment", "Job"}
NO_SERVICES = {"fetch-model", "jaeger"}
ALL = {name: built(name) for name in check.kustomizations()}
BUILT = {name: documents for name, documents in ALL.items() if name not in NO_SERVICES}
VERSION = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(params=BUILT)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return copy.deepcopy(BUILT[request.param])


@pytest.fixture(params=SERVICES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_base_and_overlays_are_there() -> None:
    assert {
        "base",
        *(f"overlays/{name}" for name in ("local", "trial", "own-models", "gpu", "gpu-autoscaled", "mtls")),
    } <= BUILT.keys()
    assert sum(name.startswith("components/") for name in BUILT) >= 7


def test_a_draft_worker_finds_draft_and_target_where_they_are_mounted() -> None:
    documents = BUILT["overlays/own-models"]
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


def used_fields() -> list[tuple[str, str]]:
    """Every (service, field) that the base or an overlay sets, by flag or by variable."""
    used = set()
    for documents in BUILT.values():
        for name, service in SERVICES.items():
            container = container_of(documents, name)
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
    found = [
        fault for documents in BUILT.values() for fault in faults(documents, {name: Service(renamed, old.full_name)})
    ]
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


def _unset_metrics(documents: list[Document]) -> None:
    args = container_of(documents, "draft-worker")["args"]
    args[:] = [arg for arg in args if not arg.startswith("--metrics-listen")]


def _init(*command: str) -> Callable[[list[Document]], None]:
    """Return the addition of an init container."""
    return lambda documents: pod_of(documents, "target-worker").update(
        initContainers=[{"name": "first", "command": list(command)}]
    )


TARGET = "Deployment/target-worker/spec/template/spec/containers/0"
PLANTED = {
    "a port moved": (_listen_elsewhere, "the process listens on {'grpc': 6000"),
    "a page that is not there": (_unset_metrics, "--metrics-listen is unset"),
    "a probe's port": (_set(f"{TARGET}/readinessProbe/grpc/port", 50052), "readinessProbe asks port 50052"),
    "a probe's service": (_set(f"{TARGET}/startupProbe/grpc/service", "healthy"), "startupProbe asks for healthy"),
    "a liveness that kills what drains": (
        _set(f"{TARGET}/livenessProbe/grpc/service", READY),
        "livenessProbe asks for ready",
    ),
    "a readiness that never says no": (
        _set(f"{TARGET}/readinessProbe/grpc/service", ALIVE),
        "readinessProbe asks for alive",
    ),
    "a sleep that the grace does not cover": (
        _set(f"{TARGET}/lifecycle/preStop/sleep/seconds", 60),
        "terminationGracePeriodSeconds is 625",
    ),
    "requests longer than the grace": (
        _set("Deployment/coordinator/spec/template/spec/containers/0/args/6", "--max-deadline-s=1200"),
        "a request takes up to 1200",
    ),
    "a command that there is not": (_init("paceline", "download", "default"), "paceline download is no command"),
    "an argument that the command does not take": (_init("paceline", "fetch", "--model", "default"), "No such option"),
    "a variable that nobody reads": (
        _set(f"{TARGET}/env/0", {"name": "OTEL_TRACES_SAMPLER_RATIO", "value": "1"}),
        "OTEL_TRACES_SAMPLER_RATIO is no setting",
    ),
    "a variable used before it is there": (
        _set(f"{TARGET}/env/0", {"name": "OTEL_RESOURCE_ATTRIBUTES", "value": "pod=$(POD_NAME)"}),
        "uses $(POD_NAME) before it is defined",
    ),
    "a Service's target": (_set("Service/target-worker/spec/ports/0/targetPort", "http"), "targetPort is http"),
    "a Service's port": (_set("Service/draft-worker/spec/ports/0/port", 80), "--draft is dns:///draft-worker:50051"),
    "too short a grace": (
        _set("Deployment/coordinator/spec/template/spec/terminationGracePeriodSeconds", 30),
        "terminationGracePeriodSeconds is 30",
    ),
    "an unknown flag": (_set(f"{TARGET}/args/3", "--drain-seconds=5"), "No such option"),
    "a refused value": (_set(f"{TARGET}/args/3", "--drain-s=-5"), "--drain-s"),
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


def test_pods_meet_the_restricted_standard() -> None:
    specs = [d["spec"]["template"]["spec"] for documents in ALL.values() for d in documents if d["kind"] in PODS]
    assert len(specs) > 3 * len(BUILT)
    for pod in specs:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_a_pod_is_its_services_own_and_leaves_in_order(documents: list[Document], name: str) -> None:
    deployment, labels = get(documents, "Deployment", name), {"app.kubernetes.io/component": name}
    account = get(documents, "ServiceAccount", name)
    assert account["automountServiceAccountToken"] is False
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    budget = get(documents, "PodDisruptionBudget", name)["spec"]
    assert budget["selector"]["matchLabels"].items() >= labels.items()
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    spread = pod_of(documents, name)["topologySpreadConstraints"]
    assert [s["topologyKey"] for s in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert all(s["labelSelector"]["matchLabels"].items() >= labels.items() for s in spread)


def test_every_object_is_in_the_namespace() -> None:
    for name, documents in ALL.items():
        where = "observability" if name == "jaeger" else None if name == "base" else "paceline"
        for document in documents:
            if document["kind"] != "Namespace":
                assert document["metadata"].get("namespace") == where, (name, document["kind"], document["metadata"])


def test_what_is_written_is_a_volume_and_the_user_is_the_images(documents: list[Document], name: str) -> None:
    pod, container = pod_of(documents, name), container_of(documents, name)
    final = dockerfile.stages(check.ROOT / "services" / name.replace("-", "_") / "Dockerfile")[-1]
    home = dockerfile.environment(final).get("PACELINE_HOME")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    written = {path for path, mount in mounts.items() if not mount.get("readOnly")}
    compiled = [e["value"] for e in container["env"] if e["name"] == "TORCHINDUCTOR_CACHE_DIR"]
    assert written == {"/tmp", *(path.rpartition("/")[0] for path in compiled)}
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume and volume["emptyDir"]["sizeLimit"]}
    assert {mounts[path]["name"] for path in written} <= empty
    if home in mounts and mounts[home]["name"] in empty:
        # What the server only reads has been written before.
        (init,) = pod["initContainers"]
        wrote = {m["mountPath"]: m["name"] for m in init["volumeMounts"] if not m.get("readOnly")}
        assert wrote[home] == mounts[home]["name"]
        assert init["image"] == container["image"].removesuffix("-compile")
    security = pod["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == dockerfile.only(final, "USER")
    assert container["image"].removesuffix("-compile") == f"paceline-{name}:{VERSION}"


def test_compiled_passes_have_a_compiler_and_a_folder(documents: list[Document]) -> None:
    container = container_of(documents, "target-worker")
    compiles = settings_of(container, SERVICES["target-worker"]).compile
    assert container["image"].endswith("-compile") == compiles
    assert any(e["name"] == "TORCHINDUCTOR_CACHE_DIR" for e in container["env"]) == compiles


def test_a_fetched_model_is_where_the_worker_looks() -> None:
    (job,) = (d for d in ALL["fetch-model"] if d["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert list(command_faults(container)) == []
    (claim,) = (d["metadata"]["name"] for d in ALL["fetch-model"] if d["kind"] == "PersistentVolumeClaim")
    pods = {"the Job": job["spec"]["template"]["spec"], "a worker": pod_of(BUILT["overlays/gpu"], "target-worker")}
    for who, pod in pods.items():
        (volume,) = (v["name"] for v in pod["volumes"] if v.get("persistentVolumeClaim", {}).get("claimName") == claim)
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume)
        assert (mount["mountPath"], bool(mount.get("readOnly"))) == ("/var/lib/paceline", who == "a worker")
    settings = settings_of(container_of(BUILT["overlays/gpu"], "target-worker"), SERVICES["target-worker"])
    assert settings.model == f"/var/lib/paceline/models/{container['command'][-1].split('/')[1]}"
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")


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
