"""The Dockerfiles against the code, and the coordinator's build stage run for real, without Docker."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from services.cli.main import COMMANDS
from tests.deploy.contract import SERVICES
from tests.deploy.dockerfile import ROOT, environment, only, run_stage, sources, stages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PATHS = {name: ROOT / "services" / name.replace("-", "_") / "Dockerfile" for name in SERVICES}


@pytest.fixture(params=PATHS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_entrypoint_is_the_services_command(name: str) -> None:
    script, command = json.loads(only(stages(PATHS[name])[-1], "ENTRYPOINT"))
    assert PROJECT["scripts"][script] == "services.cli.main:main"
    assert COMMANDS[command].module == f"services.{PATHS[name].parent.name}.__main__"


def test_environment_and_port_are_the_codes(name: str) -> None:
    settings, final = SERVICES[name].settings, stages(PATHS[name])[-1]
    variables = environment(final)
    ours = {variable for variable in variables if variable.startswith("PACELINE_")} - {"PACELINE_HOME"}
    assert ours == {settings.env_name("listen")}
    port = only(final, "EXPOSE")
    assert variables[settings.env_name("listen")] == f"0.0.0.0:{port}"
    assert settings.model_fields["listen"].default == f"127.0.0.1:{port}"


def test_final_stage_is_small_and_not_root(name: str) -> None:
    build, final = stages(PATHS[name])
    assert only(final, "USER").replace(":", "").isdigit()
    assert only(build, "FROM").removesuffix(" AS build") == only(final, "FROM") == "${PYTHON_IMAGE}"
    assert all(i.rest.startswith("--from=build ") for i in final if i.name == "COPY")
    assert sources(final) == []


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
    opt = tmp_path / "opt"
    build, final = stages(PATHS["coordinator"])
    run_stage(build, opt, tmp_path / "src")
    variables = {
        key: value.replace("${PATH}", os.environ["PATH"]).replace("/opt/", f"{opt}/")
        for key, value in environment(final).items()
    }

    def run(*command: str) -> str:
        program = next(path for p in variables["PATH"].split(":") if (path := Path(p) / command[0]).exists())
        assert program.is_relative_to(opt), program
        done = subprocess.run(
            [program, *command[1:]],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run(*json.loads(only(final, "ENTRYPOINT")), "--help")
    settings = SERVICES["coordinator"].settings
    assert all(settings.flag_name(field) in shown for field in settings.model_fields)
    imported = run(
        "python",
        "-c",
        "import sys, importlib.util, services.coordinator.__main__ as main;"
        "print(main.__file__, 'torch' in sys.modules, importlib.util.find_spec('torch'))",
    )
    assert imported.split() == [str(opt / "paceline/services/coordinator/__main__.py"), "False", "None"]
