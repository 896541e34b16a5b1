"""The three processes, started with the arguments and variables of the manifests: probes, a page, an answer, an end."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.probes import ALIVE, READY
from tests.deploy.contract import Document, built, container_of
from tests.support.models import make_tiny_llama
from tests.support.processes import Place, Processes, Service

# All pods have the same ports for probes and metrics: a host each.
HOSTS = {"coordinator": "127.0.0.11", "draft-worker": "127.0.0.12", "target-worker": "127.0.0.13"}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def arguments(container: Document, host: str) -> list[str]:
    """Return a container's arguments, with addresses of this machine."""
    here = [argument.replace("0.0.0.0", host) for argument in container["args"]]
    return [re.sub(r"dns:///([\w-]+)", lambda name: HOSTS[name[1]], argument) for argument in here]


def environment(container: Document) -> dict[str, str]:
    """Return a container's variables as the kubelet fills them in."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        value = entry.get("value", entry["name"].lower())
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], value)
    # Nobody receives spans here.
    return values | {"OTEL_TRACES_EXPORTER": "none"}


def probed(container: Document, kind: str, host: str) -> int:
    """Do as a kubelet does for a probe, and return what it is told."""
    probe = container[kind]["grpc"]
    with grpc.insecure_channel(f"{host}:{probe['port']}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=probe["service"])
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10, wait_for_ready=True).status)


@pytest.mark.slow
def test_what_the_manifests_start_serves_and_ends(tmp_path: Path) -> None:
    documents = built("overlays/trial")
    containers = {name: container_of(documents, name) for name in HOSTS}
    model = {
        "PACELINE_TARGET_MODEL": str(make_tiny_llama(tmp_path / "target")),
        "PACELINE_TARGET_KV_CACHE_MEMORY": "64MiB",
    }
    with Processes(tmp_path) as run:
        started: dict[str, Service] = {}
        for name, make in (("target-worker", run.target), ("draft-worker", run.draft)):
            env = environment(containers[name]) | (model if name == "target-worker" else {})
            place = Place(HOSTS[name])
            started[name] = make(*arguments(containers[name], HOSTS[name]), env=env, place=place)
        coordinator = run.coordinator(
            *(started["target-worker"], started["draft-worker"]),
            *arguments(containers["coordinator"], HOSTS["coordinator"]),
            env=environment(containers["coordinator"]),
            place=Place(HOSTS["coordinator"]),
        )
        started["coordinator"] = coordinator
        assert len(coordinator.generate(text="abcabc", max_tokens=12, stop={"ignore_eos": True}).tokens) == 12
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for name, host in HOSTS.items():
            (port,) = (p["containerPort"] for p in containers[name]["ports"] if p["name"] == "grpc")
            assert started[name].address == f"{host}:{port}"
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert probed(containers[name], kind, host) == SERVING, (name, kind)
            with opener.open(f"http://{host}:9464/metrics", timeout=10) as page:
                assert b"\npaceline_" in page.read()
        # With their drain in it.
        assert [started[name].stop() for name in HOSTS] == [0, 0, 0]
    assert {probe["grpc"]["service"] for c in containers.values() for k, probe in c.items() if k.endswith("Probe")} == {
        ALIVE,
        READY,
    }
