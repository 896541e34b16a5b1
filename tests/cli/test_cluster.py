from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli import cluster
from services.cli.cluster import ClusterError, local_cluster
from services.cli.up import service_arguments
from tests.cli import scripted
from tests.support.certificates import Authority

ROOT = Path(__file__).parents[2]
ROLES = ("target", "draft", "coordinator")
COMMAND = [sys.executable, "-m", "tests.cli.fakes.paceline"]

Environment = dict[str, str]


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return {**os.environ, "FAKE_PIDS": str(tmp_path), "TMPDIR": str(tmp_path)}


@contextmanager
def running(*arguments: str, env: Environment) -> Iterator[subprocess.Popen[str]]:
    """Run the command with fake services; whatever it left behind is killed."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        with process:
            yield process
            process.kill()
    finally:
        for pid in pids(env).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids(env: Environment) -> dict[str, int]:
    files = {name: Path(env["FAKE_PIDS"], name) for name in (*ROLES, "grandchild")}
    return {name: int(file.read_text()) for name, file in files.items() if file.exists()}


def alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def survivors(env: Environment) -> list[str]:
    return [name for name, pid in pids(env).items() if alive(pid)]


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    limit = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def ready_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(r"READY 127\.0\.0\.1:\d+\n", line), line
    return line.split()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_until_a_signal_and_leaves_nothing(env: Environment, number: signal.Signals) -> None:
    with running("up", env=env) as process:
        address = ready_address(process)
        answer = subprocess.run(
            [*COMMAND, "generate", "--address", address, "--prompt", "a"], cwd=ROOT, env=env, capture_output=True
        )
        assert answer.stdout.decode() == scripted.TEXT + "\n"
        assert sorted(survivors(env)) == sorted(ROLES)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert stdout == ""
    assert survivors(env) == []
    assert [path.name for path in Path(env["TMPDIR"]).glob("paceline-*")] == []


def test_up_with_a_coordinator_that_speaks_tls(env: Environment, tmp_path: Path) -> None:
    """Whether it is ready is asked of it in plain text all the same, and by a variable it may be told where."""
    authority = Authority(tmp_path)
    pair = authority.issue("coordinator")
    variables = {
        "PACELINE_COORDINATOR_TLS_CERT": pair.cert,
        "PACELINE_COORDINATOR_TLS_KEY": pair.key,
        "PACELINE_DRAFT_HEALTH_LISTEN": f"unix:{tmp_path}/health.sock",
    }
    with running("up", env=env | variables) as process:
        address = ("--address", ready_address(process), "--prompt", "a")
        assert (tmp_path / "health.sock").is_socket()
        answers = [
            subprocess.run([*COMMAND, "generate", *address, *tls], cwd=ROOT, env=env, capture_output=True, text=True)
            for tls in ((), ("--tls-ca", authority.cert))
        ]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert [answer.stdout for answer in answers] == ["", scripted.TEXT + "\n"]


def test_settings_reach_the_services(env: Environment) -> None:
    arguments = ["--listen", "127.0.0.1:0", "--model", "m", "--dtype", "float32", "--draft-model", "d", "--gamma", "2"]
    with running("up", *arguments, "--verbose", env=env) as process:
        address = ready_address(process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    listen = "--listen 127.0.0.1:0"
    # Which ports they are depends on what else runs here.
    page = r"--metrics-listen 127\.0\.0\.1:\d+"
    assert re.search(rf"target got {listen} --model m --dtype float32 {page}\n", stderr)
    assert re.search(rf"draft got {listen} --drafter model --model d --dtype float32 {page}\n", stderr)
    fixed = "--default-gamma 2 --no-adaptive-gamma"
    assert re.search(rf"coordinator got {listen} {listen} {fixed} {page} --target \S+ --draft \S+\n", stderr)
    assert address


def test_models_are_compiled_where_there_are_some() -> None:
    _, draft, target = service_arguments(compiles=True)
    assert draft[-1] == target[-1] == "--compile"
    _, draft, target = service_arguments(compiles=True, drafter="ngram")
    assert (draft[-1], target[-1]) == ("ngram", "--compile")


def test_a_draft_model_needs_a_drafter_that_has_one() -> None:
    assert service_arguments(draft_model="d", drafter="model")[1] == ["--drafter", "model", "--model", "d"]
    own = service_arguments(draft_model="default")[1]
    assert own == ["--drafter", "model", "--model", "default", "--ngram-first", "3"]
    with pytest.raises(Exception, match="--draft-model is for --drafter model"):
        service_arguments(draft_model="d", drafter="ngram")


@pytest.mark.parametrize("role", ROLES)
def test_a_service_that_cannot_start_is_named_with_its_last_words(env: Environment, role: str) -> None:
    with running("up", env={**env, f"FAKE_{role.upper()}": "fails"}) as process:
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stdout == ""
    name = role if role == "coordinator" else f"{role} worker"
    assert f"Error: the {name} ended with exit code 1; its last lines:" in stderr
    assert stderr.endswith("  the model is not there\n  make room and try again\n")
    assert survivors(env) == []


def test_a_service_that_closes_long_before_it_ends_is_named_too(env: Environment) -> None:
    with running("up", env={**env, "FAKE_TARGET": "gives up"}) as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Error: the target worker ended with exit code 1; its last lines:" in stderr
    assert stderr.endswith("  the model is damaged\n")
    assert "Traceback" not in stderr


def test_up_ends_when_a_service_dies(env: Environment) -> None:
    with running("up", env=env) as process:
        ready_address(process)
        os.kill(pids(env)["draft"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Error: the draft worker was ended by SIGKILL" in stderr
    assert survivors(env) == []


def test_ctrl_c_while_a_model_loads(env: Environment) -> None:
    with running("up", env={**env, "FAKE_TARGET": "loads"}) as process:
        assert eventually(lambda: len(pids(env)) == len(ROLES))
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (0, "")
    assert survivors(env) == []


def test_a_service_that_ignores_sigterm_is_killed(env: Environment) -> None:
    with running("up", env={**env, "FAKE_TARGET": "stubborn"}) as process:
        ready_address(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert survivors(env) == []


def test_a_second_ctrl_c_does_not_wait(env: Environment) -> None:
    with running("up", env={**env, "FAKE_COORDINATOR": "stubborn", "FAKE_PATIENCE_S": "100"}) as process:
        ready_address(process)
        process.send_signal(signal.SIGINT)
        assert eventually(Path(env["FAKE_PIDS"], "told").exists), "the first one is at work"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert survivors(env) == []


def test_what_a_service_started_ends_with_it(env: Environment) -> None:
    with running("up", env={**env, "FAKE_TARGET": "parent"}) as process:
        ready_address(process)
        assert "grandchild" in survivors(env)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert survivors(env) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent was killed")
def test_the_services_end_when_the_parent_is_killed(env: Environment) -> None:
    with running("up", env=env) as process:
        ready_address(process)
        assert sorted(survivors(env)) == sorted(ROLES)
        process.kill()
        assert eventually(lambda: survivors(env) == []), survivors(env)


def test_demo_prints_the_answer_and_stops_everything(env: Environment) -> None:
    with running("demo", env=env) as process:
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stdout == scripted.TEXT + "\n"
    assert len(pids(env)) == len(ROLES)
    assert survivors(env) == []


def test_ctrl_c_in_the_demo_leaves_nothing(env: Environment) -> None:
    with running("demo", env={**env, "FAKE_COORDINATOR": "endless"}) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "Blue"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert survivors(env) == []


def test_a_service_that_dies_in_the_demo_is_named(env: Environment) -> None:
    with running("demo", env={**env, "FAKE_COORDINATOR": "endless"}) as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == "Blue"
        os.kill(pids(env)["coordinator"], signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Error: the coordinator was ended by SIGKILL" in stderr
    assert survivors(env) == []


def test_the_demo_on_a_terminal(env: Environment) -> None:
    shown = on_terminal("demo", "--prompt", "Why [b]blue[/b]?", env={**env, "COLUMNS": "100"})
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    assert "Why [b]blue[/b]?" in plain
    assert "\x1b[32mBlue" in shown
    assert "starting the workers" in plain, "no progress was shown"
    for figure in ("tokens/s", "accepted length", "alpha", "first token", "wire"):
        assert figure in plain
    assert "2 accepted draft" in plain
    assert survivors(env) == []


def on_terminal(*arguments: str, env: Environment) -> str:
    """Run the command on a terminal of its own and return all that it wrote."""
    env = {**env, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [*COMMAND, *arguments], env)
    written = b""
    with suppress(OSError):  # what a terminal says in place of end of file
        while data := os.read(terminal, 65536):
            written += data
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, written.decode()
    return written.decode()


async def test_a_cluster_reports_what_it_waits_for(env: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR", "DRAFT", "TARGET"):
        monkeypatch.setattr(cluster, name, replace(getattr(cluster, name), module=f"tests.cli.fakes.{name.lower()}"))
    reported: list[str] = []
    async with local_cluster([], [], [], {**env, "PYTHONPATH": str(ROOT)}, reported.append) as started:
        assert reported[0] == "starting the workers"
        assert "target worker: target got --listen 127.0.0.1:0" in reported
        assert reported[-1].startswith("coordinator: coordinator got")
        os.kill(pids(env)["target"], signal.SIGKILL)
        with pytest.raises(ClusterError, match="the target worker was ended by SIGKILL"):
            await started.run(_for_ever())
    assert survivors(env) == []


async def _for_ever() -> None:
    await asyncio.Event().wait()
