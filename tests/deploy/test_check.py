"""What `make lint` finds in manifests. Some of it needs tools that only it installs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from deploy import check
from tests.deploy.contract import Document, built, container_of, get, pod_of

needs_tools = pytest.mark.skipif(not (check.TOOLS / "checkov").exists(), reason="`make lint` installs them")
TRIAL = built("overlays/trial")


@pytest.fixture
def documents() -> list[Document]:
    return copy.deepcopy(TRIAL)


@needs_tools
def test_a_custom_resource_is_held_to_its_definition(documents: list[Document]) -> None:
    assert check.custom_faults(documents) == []
    scaler: Any = get(documents, "ScaledObject", "target-worker")["spec"]
    scaler["maxReplicas"] = scaler.pop("maxReplicaCount")
    del scaler["triggers"][0]["type"]
    get(documents, "PodMonitor", "paceline")["spec"]["podMetricsEndpoint"] = []
    found = check.custom_faults([*documents, {**documents[0], "apiVersion": "keda.sh/v1alpha1", "kind": "ScaledThing"}])
    assert len(found) == 4
    for message in ("spec.maxReplicas: Extra inputs", "triggers.0.type: Field required", "podMetricsEndpoint: Extra"):
        assert any(message in fault for fault in found), found
    assert any("there is no definition of keda.sh/v1alpha1 ScaledThing" in fault for fault in found)


@needs_tools
def test_a_weak_spot_is_found(documents: list[Document]) -> None:
    container_of(documents, "target-worker")["securityContext"]["privileged"] = True
    found = check.checkov_faults({"overlays/trial": documents})
    assert [line for line in found if line.startswith("Check: ")] == [
        'Check: CKV_K8S_16: "Container should not be privileged"'
    ]


def test_a_field_that_there_is_not_is_found(documents: list[Document]) -> None:
    pod_of(documents, "target-worker")["containers"][0]["livenesProbe"] = {}
    (fault,) = check.schema_faults(documents)
    assert "'livenesProbe' was unexpected" in fault
    assert fault.endswith("(1.30 1.31 1.32 1.33 1.34 1.35 1.36 1.37)")
