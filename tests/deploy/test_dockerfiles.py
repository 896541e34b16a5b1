"""The Dockerfiles against the code, and the coordinator's build stage run for real, without Docker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.cli.main import COMMANDS
from services.common.rpc.probes import ALIVE, READY
from tests.deploy.contract import SERVICES
from tests.deploy.dockerfile import ROOT, environment, only, run_stage, sources, stages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Status = health_pb2.HealthCheckResponse
PATHS = {name: ROOT / "services" / name.replace("-", "_") / "Dockerfile" for name in SERVICES}


@pytest.fixture(params=PATHS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_entrypoint_is_the_services_command(name: str) -> None:
    program, *arguments = json.loads(only(stages(PATHS[name])[-1], "ENTRYPOINT"))
    module = f"services.{PATHS[name].parent.name}"
    if name == "coordinator":
        assert (program, arguments) == ("/usr/bin/python3", ["-m", module])
    else:
        (command,) = arguments
        assert PROJECT["scripts"][program] == "services.cli.main:main"
        assert COMMANDS[command].module == f"{module}.__main__"


def test_environment_and_port_are_the_codes(name: str) -> None:
    settings, final = SERVICES[name].settings, stages(PATHS[name])[-1]
    variables = environment(final)
    ours = {variable for variable in variables if variable.startswith("PACELINE_")} - {"PACELINE_HOME"}
    assert ours == {settings.env_name("listen"), settings.env_name("log_format")}
    # What reads a container's log is a machine.
    assert variables[settings.env_name("log_format")] == "json"
    port = only(final, "EXPOSE")
    assert variables[settings.env_name("listen")] == f"0.0.0.0:{port}"
    assert settings.model_fields["listen"].default == f"127.0.0.1:{port}"


def test_final_stage_is_small_and_not_root(name: str) -> None:
    build, final = stages(PATHS[name])
    assert only(final, "USER").replace(":", "").isdigit()
    assert only(build, "FROM") == "${PYTHON_IMAGE} AS build"
    assert only(final, "FROM") == ("${RUNTIME_IMAGE}" if name == "coordinator" else "${PYTHON_IMAGE}")
    assert all(i.rest.startswith("--from=build ") for i in final if i.name == "COPY")
    assert sources(final) == []


def test_bases_are_versions_that_a_digest_can_be_put_in_place_of(name: str) -> None:
    lines = PATHS[name].read_text().splitlines()
    bases = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if "_IMAGE=" in line and line[:4] == "ARG ")
    assert {only(stage, "FROM").split()[0].strip("${}") for stage in stages(PATHS[name])} == bases.keys()
    assert all(":" in image and not image.endswith(":latest") for image in bases.values())


def test_the_coordinators_image_is_made_without_a_shell() -> None:
    final = stages(PATHS["coordinator"])[-1]
    assert not [i for i in final if i.name in {"RUN", "SHELL", "CMD"}]
    assert json.loads(only(final, "ENTRYPOINT"))


def test_what_is_copied_exists_and_is_sent_to_the_builder(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for source in sources(stages(PATHS[name])[0]):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored


def test_requirements_are_the_projects(name: str, tmp_path: Path) -> None:
    run_stage(stages(PATHS[name])[0], tmp_path / "opt", tmp_path / "src", offline=True)
    asked = (tmp_path / "src" / "requirements.txt").read_text().split("\n")[:-1]
    worker = [] if name == "coordinator" else PROJECT["optional-dependencies"]["worker"]
    assert asked == PROJECT["dependencies"] + worker
    assert any(requirement.startswith("torch") for requirement in asked) == (name != "coordinator")


def test_worker_images_share_their_layers() -> None:
    draft, target = (stages(PATHS[name])[0] for name in ("draft-worker", "target-worker"))
    assert draft == target


@pytest.mark.slow
def test_coordinator_image_serves_without_torch(tmp_path: Path) -> None:
    """Its build stage run for real; then what its last stage says, by a Python that knows no other packages."""
    opt = tmp_path / "opt"
    build, final = stages(PATHS["coordinator"])
    run_stage(build, opt, tmp_path / "src")
    variables = {key: value.replace("/opt/", f"{opt}/") for key, value in environment(final).items()}
    _, *arguments = json.loads(only(final, "ENTRYPOINT"))
    python = plain_python(tmp_path)
    imported = subprocess.run(
        [
            python,
            "-c",
            "import sys, importlib.util as u, services.coordinator.app as a; print(a.__file__, u.find_spec('torch'))",
        ],
        **(options := {"cwd": tmp_path, "env": variables, "text": True}),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert imported.stdout.split() == [str(opt / "paceline/services/coordinator/app.py"), "None"]
    health, metrics = free_port(), free_port()
    ports = {"--listen": 0, "--health-listen": health, "--metrics-listen": metrics}
    flags = [f"{flag}=127.0.0.1:{port}" for flag, port in ports.items()]
    with subprocess.Popen([python, *arguments, *flags], stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("LISTENING 127.0.0.1:")
        assert [told(health, name) for name in (ALIVE, READY)] == [Status.SERVING, Status.NOT_SERVING]
        with socket.create_connection(("127.0.0.1", metrics), timeout=10):
            process.terminate()
        assert process.wait(30) == 0


def plain_python(folder: Path) -> Path:
    """Return a Python without packages, of this one's version: the system's, else one in a new environment."""
    system = Path(f"/usr/bin/python3.{sys.version_info.minor}")
    if system.exists():
        return system
    venv.create(folder / "plain", with_pip=False)
    return folder / "plain" / "bin" / "python"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def told(port: int, name: str) -> int:
    """Return what a probe is told."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True).status


def test_a_compiler_is_there_when_it_is_asked_for() -> None:
    for name in ("draft-worker", "target-worker"):
        final = stages(PATHS[name])[-1]
        assert [i.rest for i in final if i.name == "ARG"] == ["COMPILER="]
        (install,) = (i.rest for i in final if "apt-get" in i.rest)
        assert install.startswith('if [ -n "${COMPILER}" ]; then')
        assert '--no-install-recommends "${COMPILER}"' in install
    asked = (ROOT / "deploy/k8s/components/compile/kustomization.yaml").read_text()
    assert "--build-arg COMPILER=g++=" in asked
