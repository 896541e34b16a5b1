"""What the manifests say against what the code has. `faults` is a function of both, so that tests can change either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from paceline.v1 import coordinator_pb2, draft_pb2, target_pb2
from services.common.rpc.settings import ServerSettings, Settings, options, parse
from services.coordinator.config import CoordinatorSettings
from services.draft_worker.config import DraftSettings
from services.target_worker.config import TargetSettings

Document = dict[str, Any]


class Service(NamedTuple):
    """A service as the code knows it."""

    settings: type[Settings]
    full_name: str
    """The name that its health is asked by."""


SERVICES = {
    "coordinator": Service(
        CoordinatorSettings, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    ),
    "draft-worker": Service(DraftSettings, draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name),
    "target-worker": Service(TargetSettings, target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name),
}
NOT_SETTINGS = {"PACELINE_HOME"}
"""Read by the code, but by no service's settings."""
EXIT_MARGIN_S = 5
"""Between the end of the last stream and Kubernetes' SIGKILL."""


def get(documents: list[Document], kind: str, name: str) -> Document:
    """Return the one object of that kind and name."""
    (found,) = (d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)
    return found


def pod_of(documents: list[Document], name: str) -> Document:
    """Return the pod's specification in a Deployment."""
    spec: Document = get(documents, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def container_of(documents: list[Document], name: str) -> Document:
    """Return the one container of a Deployment."""
    (container,) = pod_of(documents, name)["containers"]
    return dict(container)


def settings_of(container: Document, service: Service) -> Any:
    """Return the settings that a container's process has: parsed by the code itself, from arguments and environment.

    Raises:
        click.UsageError: The code does not know a flag, or refuses a value.
    """
    fields = {service.settings.env_name(field): field for field in service.settings.model_fields}
    values = {fields[e["name"]]: e["value"] for e in container["env"] if e["name"] in fields and "value" in e}
    parser = click.Command(service.full_name, params=options(service.settings))
    context = parser.make_context(service.full_name, list(container["args"]))
    # What a flag is by default says nothing: a variable wins over it.
    given = {f for f in context.params if context.get_parameter_source(f) is ParameterSource.COMMANDLINE}
    return parse(service.settings, values | {f: value for f, value in context.params.items() if f in given})


def faults(documents: list[Document], services: Mapping[str, Service] = SERVICES) -> list[str]:
    """Return every difference between manifests and code."""
    found: list[str] = []
    for name, service in services.items():
        container = container_of(documents, name)
        found += [f"{name}: {fault}" for fault in environment_faults(container, service)]
        try:
            settings = settings_of(container, service)
        except click.UsageError as error:
            found.append(f"{name}: {error.message}")
            continue
        found += [f"{name}: {fault}" for fault in port_faults(documents, name, settings, service)]
        found += [f"{name}: {fault}" for fault in time_and_cpu_faults(pod_of(documents, name), settings)]
        if name == "coordinator":
            found += [f"{name}: {fault}" for fault in address_faults(documents, settings)]
    return found


def environment_faults(container: Document, service: Service) -> Iterator[str]:
    """Yield the variables that look like settings and are none."""
    known = {service.settings.env_name(field) for field in service.settings.model_fields} | NOT_SETTINGS
    for variable in container["env"]:
        if variable["name"].startswith("PACELINE_") and variable["name"] not in known:
            yield f"{variable['name']} is no setting"


def port_faults(documents: list[Document], name: str, settings: ServerSettings, service: Service) -> Iterator[str]:
    """Yield ports and probes that do not lead to where the process listens."""
    container = container_of(documents, name)
    host, _, listens = settings.listen.rpartition(":")
    port = int(listens)
    if host != "0.0.0.0":
        yield f"listens on {host}, where no other pod gets"
    named = {p["name"]: p["containerPort"] for p in container["ports"]}
    if list(named.values()) != [port]:
        yield f"containerPort is {list(named.values())}, the process listens on {port}"
    (service_port,) = get(documents, "Service", name)["spec"]["ports"]
    if named.get(service_port["targetPort"], service_port["targetPort"]) != port:
        yield f"the Service's targetPort is {service_port['targetPort']}, the process listens on {port}"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        handler = probe.get("grpc") or probe["tcpSocket"]
        if named.get(handler["port"], handler["port"]) != port:
            yield f"{kind} asks port {handler['port']}, the process listens on {port}"
        if "grpc" in probe and handler["service"] != service.full_name:
            yield f"{kind} asks for {handler['service']}, the process serves {service.full_name}"


def time_and_cpu_faults(pod: Document, settings: ServerSettings) -> Iterator[str]:
    """Yield a grace that cuts streams, and threads for which there are no cores."""
    needed = settings.drain_s + settings.shutdown_grace_s + EXIT_MARGIN_S
    if pod["terminationGracePeriodSeconds"] < needed:
        yield f"terminationGracePeriodSeconds is {pod['terminationGracePeriodSeconds']}, ending takes up to {needed:g}"
    threads = getattr(settings, "threads", None)
    cores = pod["containers"][0]["resources"]["requests"]["cpu"]
    if threads is not None and str(threads) != cores:
        yield f"{threads} threads on a request of {cores} cores"


def address_faults(documents: list[Document], settings: CoordinatorSettings) -> Iterator[str]:
    """Yield worker addresses that name no Service, or not its port."""
    for field, name in (("target", "target-worker"), ("draft", "draft-worker")):
        (port,) = get(documents, "Service", name)["spec"]["ports"]
        right = f"dns:///{name}:{port['port']}"
        if getattr(settings, field) != right:
            yield f"--{field} is {getattr(settings, field)}, the Service is at {right}"
