"""Who reaches whom, by the policies as they are applied."""

from __future__ import annotations

import copy

import pytest

from deploy import check
from tests.deploy.contract import SERVICES, Document, built, get
from tests.deploy.network import Peer, allows

BUILT = {
    name: built(name)
    for name in check.kustomizations()
    if name.startswith("overlays/") or name == "components/monitoring"
}
NAME = "kubernetes.io/metadata.name"
OURS = {NAME: "paceline", "paceline/callers": "allowed"}
CALLER = Peer({"app": "chat"}, {NAME: "chat", "paceline/callers": "allowed"})
STRANGER = Peer({"app": "chat"}, {NAME: "chat"})
PROMETHEUS = Peer({}, {NAME: "monitoring"})
JAEGER = Peer({"app.kubernetes.io/name": "jaeger"}, {NAME: "observability"})
DNS = Peer({"k8s-app": "kube-dns"}, {NAME: "kube-system"})
INTERNET, METADATA_SERVER = Peer(address="151.101.0.223"), Peer(address="169.254.169.254")
GRPC = {"coordinator": 50050, "draft-worker": 50051, "target-worker": 50052}
METRICS, OTLP = 9464, 4317


@pytest.fixture(params=BUILT)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return copy.deepcopy(BUILT[request.param])


def pod(documents: list[Document], name: str) -> Peer:
    """Return a pod of a Deployment."""
    return Peer(get(documents, "Deployment", name)["spec"]["template"]["metadata"]["labels"], OURS)


def test_only_the_coordinator_reaches_the_workers(documents: list[Document]) -> None:
    coordinator, draft, target = (pod(documents, name) for name in GRPC)
    assert allows(documents, coordinator, target, GRPC["target-worker"])
    assert allows(documents, coordinator, draft, GRPC["draft-worker"])
    others = [STRANGER, CALLER, PROMETHEUS, JAEGER, DNS, INTERNET, Peer({"app": "ours"}, OURS)]
    for worker, port in ((draft, GRPC["draft-worker"]), (target, GRPC["target-worker"])):
        assert not [other for other in (*others, draft, target) if allows(documents, other, worker, port)]
    for worker in (draft, target):
        assert not allows(documents, worker, coordinator, GRPC["coordinator"])


def test_callers_are_namespaces_that_are_told_so(documents: list[Document]) -> None:
    coordinator = pod(documents, "coordinator")
    assert allows(documents, CALLER, coordinator, GRPC["coordinator"])
    assert allows(documents, Peer({"app": "ours"}, OURS), coordinator, GRPC["coordinator"])
    assert not [s for s in (STRANGER, INTERNET, PROMETHEUS) if allows(documents, s, coordinator, GRPC["coordinator"])]
    if namespaces := [d for d in documents if d["kind"] == "Namespace"]:
        assert namespaces[0]["metadata"]["labels"].items() >= {"paceline/callers": "allowed"}.items()


def test_monitoring_reaches_the_metrics_and_nothing_else(documents: list[Document]) -> None:
    monitored = any(d["kind"] == "PodMonitor" for d in documents)
    for name in SERVICES:
        peer = pod(documents, name)
        assert allows(documents, PROMETHEUS, peer, METRICS) == monitored
        assert not allows(documents, CALLER, peer, METRICS)
        assert not allows(documents, PROMETHEUS, peer, GRPC[name])
        assert allows(documents, peer, JAEGER, OTLP) == monitored
        assert not allows(documents, peer, JAEGER, 16686)


def test_everybody_asks_for_names_and_only_a_fetch_goes_outside(documents: list[Document]) -> None:
    for name in SERVICES:
        peer = pod(documents, name)
        assert allows(documents, peer, DNS, 53, "UDP")
        assert allows(documents, peer, DNS, 53)
        assert allows(documents, peer, INTERNET, 443) == ("initContainers" in str(get(documents, "Deployment", name)))
        assert not allows(documents, peer, METADATA_SERVER, 443)
        assert not allows(documents, peer, INTERNET, 80)


def test_the_trial_jaeger_takes_spans_from_paceline_alone() -> None:
    documents = built("jaeger")
    jaeger = Peer(get(documents, "Deployment", "jaeger")["spec"]["template"]["metadata"]["labels"], JAEGER.namespace)
    assert allows(documents, Peer({}, OURS), jaeger, OTLP)
    assert not allows(documents, STRANGER, jaeger, OTLP)
    assert not allows(documents, jaeger, INTERNET, 443)


def test_a_job_that_fetches_reaches_the_hub_and_is_reached_by_nobody() -> None:
    documents = built("fetch-model")
    (job,) = (d for d in documents if d["kind"] == "Job")
    peer = Peer(job["spec"]["template"]["metadata"]["labels"], OURS)
    assert allows(documents, peer, INTERNET, 443)
    assert allows(documents, peer, DNS, 53, "UDP")
    assert not allows(documents, peer, METADATA_SERVER, 443)
    assert not allows(documents, CALLER, peer, 443)
