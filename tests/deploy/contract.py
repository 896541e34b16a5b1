"""What the manifests say against what the code has. `faults` is a function of both, so that tests can change either."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
from click.core import ParameterSource
from opentelemetry.sdk import environment_variables as sdk_variables

from deploy import check
from paceline.v1 import coordinator_pb2, draft_pb2, target_pb2
from services.cli.main import COMMANDS, main
from services.common.rpc.probes import ALIVE, READY
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
OTHERS = {
    # glibc, libgomp and torch read these,
    *(
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "OMP_NUM_THREADS",
        "TORCHINDUCTOR_CACHE_DIR",
    ),
    # and only other variables these.
    *("POD_NAME", "POD_NAMESPACE", "NODE_NAME"),
}
PORTS = {"grpc": "listen", "health": "health_listen", "metrics": "metrics_listen"}
"""A container's ports, and the settings that say where the process listens."""
EXIT_MARGIN_S = 5
"""Between the end of the last stream and Kubernetes' SIGKILL."""


@functools.cache
def built(name: str) -> list[Document]:
    """Return a kustomization's objects, built once for all tests: copy what you change."""
    return check.build(name)


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
    longest_s = longest_request_s(documents)
    for name, service in services.items():
        container = container_of(documents, name)
        found += [f"{name}: {fault}" for init in init_of(documents, name) for fault in command_faults(init)]
        found += [f"{name}: {fault}" for fault in environment_faults(container, service)]
        try:
            settings = settings_of(container, service)
        except click.UsageError as error:
            found.append(f"{name}: {error.message}")
            continue
        found += [f"{name}: {fault}" for fault in port_faults(documents, name, settings)]
        found += [f"{name}: {fault}" for fault in time_and_cpu_faults(pod_of(documents, name), settings)]
        if longest_s and settings.shutdown_grace_s < longest_s:
            found.append(
                f"{name}: --shutdown-grace-s is {settings.shutdown_grace_s:g}, a request takes up to {longest_s:g}"
            )
        if name == "coordinator":
            found += [f"{name}: {fault}" for fault in address_faults(documents, settings)]
    return found


def init_of(documents: list[Document], name: str) -> list[Document]:
    """Return the init containers of a Deployment."""
    return list(pod_of(documents, name).get("initContainers", []))


def longest_request_s(documents: list[Document]) -> float | None:
    """Return what the coordinator's settings allow; None where the code refuses them, which is told elsewhere."""
    try:
        settings = settings_of(container_of(documents, "coordinator"), SERVICES["coordinator"])
    except click.UsageError:
        return None
    return float(settings.max_deadline_s)


def command_faults(container: Document) -> Iterator[str]:
    """Yield what the command line refuses of a container that runs a `paceline` command."""
    program, name, *arguments = container["command"]
    if program != "paceline" or name not in COMMANDS:
        yield f"{container['name']}: {program} {name} is no command"
        return
    command = main.get_command(click.Context(main), name)
    assert command is not None
    try:
        command.make_context(name, arguments)
    except click.UsageError as error:
        yield f"{container['name']}: {error.message}"


def environment_faults(container: Document, service: Service) -> Iterator[str]:
    """Yield the variables that nobody reads."""
    known = {service.settings.env_name(field) for field in service.settings.model_fields} | NOT_SETTINGS | OTHERS
    known |= {name for name in vars(sdk_variables) if name.startswith("OTEL_")}
    defined: set[str] = set()
    for variable in container["env"]:
        if variable["name"] not in known:
            yield f"{variable['name']} is no setting"
        # Kubernetes leaves $(NAME) as it is where NAME comes later.
        for name in re.findall(r"\$\((\w+)\)", variable.get("value", "")):
            if name not in defined:
                yield f"{variable['name']} uses $({name}) before it is defined"
        defined.add(variable["name"])


def port_faults(documents: list[Document], name: str, settings: ServerSettings) -> Iterator[str]:
    """Yield ports and probes that do not lead to where the process listens."""
    container = container_of(documents, name)
    named = {p["name"]: p["containerPort"] for p in container["ports"]}
    listening = {}
    for port, field in PORTS.items():
        host, _, number = getattr(settings, field).rpartition(":")
        listening[port] = int(number or 0)
        if host != "0.0.0.0":
            yield f"{settings.flag_name(field)} is {host or 'unset'}, where no other pod gets"
    if named != listening:
        yield f"its ports are {named}, the process listens on {listening}"
    (service_port,) = get(documents, "Service", name)["spec"]["ports"]
    if named.get(service_port["targetPort"], service_port["targetPort"]) != listening["grpc"]:
        yield f"the Service's targetPort is {service_port['targetPort']}, the process listens on {listening['grpc']}"
    asked = {kind: container[kind].get("grpc") for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    for kind, probe in asked.items():
        if probe is None or probe["port"] != listening["health"]:
            yield f"{kind} asks port {probe and probe['port']}, health is on {listening['health']}"
        elif probe["service"] not in (ALIVE, READY):
            yield f"{kind} asks for {probe['service']}, the port knows {ALIVE} and {READY}"
    # A loading or draining pod is not ready, and must not be killed for it.
    if asked["livenessProbe"] and asked["livenessProbe"]["service"] != ALIVE:
        yield f"livenessProbe asks for {asked['livenessProbe']['service']}"
    if asked["readinessProbe"] and asked["readinessProbe"]["service"] != READY:
        yield f"readinessProbe asks for {asked['readinessProbe']['service']}"


def time_and_cpu_faults(pod: Document, settings: ServerSettings) -> Iterator[str]:
    """Yield a grace that cuts streams, and threads for which there are no cores."""
    container = pod["containers"][0]
    waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = waits_s + settings.drain_s + settings.shutdown_grace_s + EXIT_MARGIN_S
    if pod["terminationGracePeriodSeconds"] < needed:
        yield f"terminationGracePeriodSeconds is {pod['terminationGracePeriodSeconds']}, ending takes up to {needed:g}"
    threads = getattr(settings, "threads", None)
    cores = container["resources"]["requests"]["cpu"]
    openmp = {e["name"]: e.get("value") for e in container["env"]}.get("OMP_NUM_THREADS")
    if threads is not None and not str(threads) == cores == openmp:
        yield f"{threads} threads on a request of {cores} cores, OMP_NUM_THREADS is {openmp}"


def address_faults(documents: list[Document], settings: CoordinatorSettings) -> Iterator[str]:
    """Yield worker addresses that name no Service, or not its port."""
    for field, name in (("target", "target-worker"), ("draft", "draft-worker")):
        (port,) = get(documents, "Service", name)["spec"]["ports"]
        right = f"dns:///{name}:{port['port']}"
        if getattr(settings, field) != right:
            yield f"--{field} is {getattr(settings, field)}, the Service is at {right}"
