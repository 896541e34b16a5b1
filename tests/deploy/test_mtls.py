"""Certificates, Secrets and settings of the manifests fit together, and what they ask for is let in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy import check
from paceline.v1 import coordinator_pb2 as pb
from services.common.rpc.tls import ClientFiles, ClientTls
from tests.deploy.contract import SERVICES, Document, built, container_of, get, pod_of, settings_of
from tests.support.certificates import Authority
from tests.support.cluster import scripted_cluster
from tests.support.laws import close_law

MTLS = built("overlays/mtls")
WORKERS = ("draft-worker", "target-worker")
FILES = ("tls_cert", "tls_key", "tls_ca", "workers_tls_ca", "workers_tls_cert", "workers_tls_key", "tokens")
# What cert-manager puts into a Secret.
KEYS = {"tls.crt", "tls.key", "ca.crt"}
TOKEN = "0123456789abcdef"


def settings(name: str, documents: list[Document] = MTLS) -> Any:
    return settings_of(container_of(documents, name), SERVICES[name])


def mounted(name: str) -> dict[str, str]:
    """Return the Secrets in a pod, by the folders that they are in."""
    secrets = {v["name"]: v["secret"] for v in pod_of(MTLS, name)["volumes"] if "secret" in v}
    found = {}
    for mount in container_of(MTLS, name)["volumeMounts"]:
        if mount["name"] in secrets:
            assert mount["readOnly"], mount
            assert "subPath" not in mount, "a file by subPath is never replaced"
            assert secrets[mount["name"]]["defaultMode"] == 0o440
            found[mount["mountPath"]] = secrets[mount["name"]]["secretName"]
    return found


def certificate(name: str) -> Document:
    spec: Document = get(MTLS, "Certificate", name)["spec"]
    return spec


@pytest.mark.parametrize("name", SERVICES)
def test_every_file_is_in_a_secret_that_somebody_fills(name: str) -> None:
    folders = mounted(name)
    told = {field: getattr(settings(name), field, "") for field in FILES}
    for field, path in told.items():
        if not path:
            continue
        folder, _, key = path.rpartition("/")
        if field == "tokens":
            assert (folders[folder], key) == ("callers", "tokens")
            assert "--from-file=tokens" in (check.K8S / "components/mtls/kustomization.yaml").read_text()
        else:
            assert folders[folder] == certificate(name)["secretName"]
            assert key in KEYS
    assert told["tls_cert"]
    assert told["tls_key"]
    assert not settings(name).insecure


def test_the_authority_signs_for_all() -> None:
    signer = get(MTLS, "Issuer", "authority")["spec"]["ca"]["secretName"]
    assert (certificate("authority")["secretName"], certificate("authority")["isCA"]) == (signer, True)
    for name in SERVICES:
        assert certificate(name)["issuerRef"] == {"kind": "Issuer", "name": "authority"}
        assert "server auth" in certificate(name)["usages"]
        assert ("client auth" in certificate(name)["usages"]) == (name == "coordinator")


def test_workers_are_who_the_coordinator_calls_and_let_nobody_else_in() -> None:
    coordinator = settings("coordinator")
    for field, name in (("draft", "draft-worker"), ("target", "target-worker")):
        host = getattr(coordinator, field).removeprefix("dns:///").partition(":")[0]
        assert host in certificate(name)["dnsNames"]
        allowed = set(settings(name).allowed_callers)
        assert allowed == set(certificate("coordinator")["uris"])
        for other in WORKERS:
            assert not allowed & {*certificate(other)["dnsNames"], *certificate(other).get("uris", ())}
    assert coordinator.workers_tls_cert == coordinator.tls_cert


def test_plain_text_is_told_of_where_it_is_and_nowhere_else() -> None:
    for overlay in (name for name in check.kustomizations() if name.startswith("overlays/")):
        documents = built(overlay)
        for name in SERVICES:
            is_tls = bool(settings(name, documents).tls_cert)
            assert settings(name, documents).insecure is not is_tls
            (port,) = get(documents, "Service", name)["spec"]["ports"]
            assert (port["appProtocol"] == "kubernetes.io/h2c") is not is_tls
            assert is_tls == (overlay == "overlays/mtls")


async def test_what_the_manifests_ask_for_is_let_in(tmp_path: Path) -> None:
    """Certificates by the Certificates' names, where the settings look for them: everybody finds everybody."""
    authority = Authority(tmp_path)

    def placed(name: str) -> dict[str, str]:
        """Return a service's settings of files, with files of this machine."""
        spec = certificate(name)
        pair = authority.issue(name, dns=spec["dnsNames"], uris=spec.get("uris", ()))
        (tmp_path / "tokens").write_text(f"me: {TOKEN}\n")
        here = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.cert, "tokens": str(tmp_path / "tokens")}
        told = {field: getattr(settings(name), field, "") for field in FILES}
        return {field: here[path.rpartition("/")[2]] for field, path in told.items() if path}

    worker = {**placed("target-worker"), "tls_clients": settings("target-worker").tls_clients}
    tls = ClientTls(ClientFiles(authority.cert, server_name="coordinator"))
    law = close_law(distance=0.5, seed=2)
    async with scripted_cluster(
        law, worker_settings=worker, tls=tls, wait_for_draft=False, **placed("coordinator")
    ) as cluster:
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[0, 1]), max_tokens=4)
        refused = cluster.stub.Generate(request, timeout=30)
        assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED
        answered = cluster.stub.Generate(request, timeout=30, metadata=(("authorization", f"Bearer {TOKEN}"),))
        replies = [reply async for reply in answered]
        assert replies[-1].result.usage.completion_tokens == 4


def test_a_certificate_is_held_to_its_definition() -> None:
    if not check.TOOLS.exists():
        pytest.skip("`make lint` installs the definitions")
    documents = copy.deepcopy(MTLS)
    get(documents, "Certificate", "coordinator")["spec"]["dnsName"] = "coordinator"
    (fault,) = check.custom_faults(documents)
    assert "Certificate coordinator, spec.dnsName: Extra inputs" in fault
