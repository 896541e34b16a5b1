"""Real processes with random little models: killed in mid-text, left by clients, started wrong, ended in order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from filelock import FileLock
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import target_pb2, target_pb2_grpc, worker_pb2
from services.common.engine.default_model import NAME
from tests.faults.conftest import OFFLINE
from tests.support.cluster import Reply
from tests.support.processes import Coordinator, Processes, Service

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ONE_SESSION = ("--dtype", "float32", "--max-sessions", "1", "--session-wait-s", "0.5")
GREEDY = worker_pb2.SamplingParams(temperature=0.0)
PLAIN = worker_pb2.SamplingParams(temperature=1.0)
REQUEST: dict[str, Any] = {
    "text": "Once upon a time",
    "max_tokens": 300,
    "gamma": 3,
    "seed": 5,
    "verification": worker_pb2.VERIFICATION_TOKEN,
    "stop": pb.StopConditions(ignore_eos=True),
}
SHORT = REQUEST | {"max_tokens": 4}
ENDLESS = REQUEST | {"max_tokens": 4000, "sampling": PLAIN}


@dataclass(frozen=True)
class Paceline:
    """The three services; each worker has room for one session."""

    target: Service
    draft: Service
    coordinator: Coordinator


@pytest.fixture(scope="module")
def paceline(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paceline]:
    with Processes(tmp_path_factory.mktemp("logs"), OFFLINE) as run:
        target = run.target("--model", str(models / "target"), *ONE_SESSION)
        draft = run.draft("--drafter", "model", "--model", str(models / "draft"), *ONE_SESSION)
        coordinator = run.coordinator(target, draft, "--target-retry-s", "120")
        yield Paceline(target, draft, coordinator)


# --- Workers that are lost, clients that leave. ---------------------------------------------------------------------


def disturbed(coordinator: Coordinator, disturb: Callable[[], None], **fields: Any) -> Reply:
    """Generate, and do something as soon as 20 tokens have come."""
    chunks: list[pb.TextChunk] = []
    seen, result = 0, None
    with coordinator.connected() as stub:
        for item in stub.Generate(pb.GenerateRequest(**fields), timeout=200):
            if item.HasField("result"):
                result = item.result
                continue
            chunks.append(item.chunk)
            before, seen = seen, seen + len(item.chunk.tokens)
            if before < 20 <= seen:
                disturb()
    assert result is not None
    return Reply(tuple(chunks), result)


def test_the_draft_is_killed_in_mid_text(paceline: Paceline) -> None:
    fields = REQUEST | {"sampling": GREEDY}
    undisturbed = paceline.coordinator.generate(**fields)
    reply = disturbed(paceline.coordinator, paceline.draft.kill, **fields)
    assert "draft lost" in paceline.coordinator.log
    assert reply.tokens == undisturbed.tokens
    assert reply.text == undisturbed.text
    assert undisturbed.result.speculation.degraded_rounds == 0
    rounds = reply.result.speculation.per_round
    assert not rounds[0].degraded
    assert rounds[-2].degraded
    # Once it is back it is used again.
    paceline.draft.restart()
    paceline.draft.wait_until_serving()
    paceline.coordinator.wait_for_draft()
    assert paceline.coordinator.generate(**fields).tokens == undisturbed.tokens


def test_the_target_is_killed_and_restarted_in_mid_text(paceline: Paceline) -> None:
    fields = REQUEST | {"sampling": PLAIN}
    undisturbed = paceline.coordinator.generate(**fields)

    def kill_and_restart() -> None:
        paceline.target.kill()
        paceline.target.restart()

    reply = disturbed(paceline.coordinator, kill_and_restart, **fields)
    assert "target lost" in paceline.coordinator.log
    assert len(set(undisturbed.tokens)) > 50
    assert {pb.TOKEN_ORIGIN_ACCEPTED_DRAFT, pb.TOKEN_ORIGIN_RESIDUAL, pb.TOKEN_ORIGIN_BONUS} <= set(undisturbed.origins)
    assert reply.tokens == undisturbed.tokens
    assert reply.origins == undisturbed.origins
    assert reply.text == undisturbed.text
    # One round waited for the restart, with the proposal that it had.
    proposed = [[row.proposed for row in r.result.speculation.per_round] for r in (reply, undisturbed)]
    assert proposed[0] == proposed[1]


def test_a_client_that_leaves_frees_both_workers(paceline: Paceline) -> None:
    """Each worker has room for one session: the next request has drafts and rows only if both have been freed."""
    for _ in range(3):
        with paceline.coordinator.connected() as stub:
            call = stub.Generate(pb.GenerateRequest(**ENDLESS), timeout=200)
            next(iter(call))
            call.cancel()
        left_s = time.monotonic()
        while paceline.coordinator.generate(**SHORT).result.speculation.degraded_rounds:
            # A pass takes a few milliseconds; a session that is not freed by its end stays for a minute and more.
            assert time.monotonic() - left_s < 10


def test_a_full_target_is_waited_for(paceline: Paceline) -> None:
    with paceline.coordinator.connected() as stub:
        call = stub.Generate(pb.GenerateRequest(**ENDLESS), timeout=200)
        next(iter(call))
        with pytest.raises(grpc.RpcError) as caught:
            paceline.coordinator.generate(timeout_s=5.0, **SHORT)
        call.cancel()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "RESOURCE_EXHAUSTED" in paceline.coordinator.log
    assert len(paceline.coordinator.generate(**SHORT).tokens) == 4


# --- buf's own client, by reflection. -------------------------------------------------------------------------------


def buf(service: Service, path: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("buf")), "curl", "--http2-prior-knowledge", "--protocol", "grpc"]
    done = subprocess.run(
        [*command, *arguments, f"http://{service.address}{path}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_buf_curl_lists_what_is_served(paceline: Paceline) -> None:
    assert "paceline.v1.CoordinatorService/Generate" in buf(paceline.coordinator, "", "--list-methods").split()
    assert "paceline.v1.TargetService/Verify" in buf(paceline.target, "", "--list-methods").split()
    assert "paceline.v1.DraftService/Propose" in buf(paceline.draft, "", "--list-methods").split()
    for service in (paceline.coordinator, paceline.target, paceline.draft):
        assert "grpc.health.v1.Health" in buf(service, "", "--list-services").split()


def test_buf_curl_generates(paceline: Paceline) -> None:
    data = {"text": "Once upon a time", "maxTokens": 5, "sampling": {"temperature": 0}, "stop": {"ignoreEos": True}}
    lines = buf(paceline.coordinator, "/paceline.v1.CoordinatorService/Generate", "--data", json.dumps(data))
    decoder, items = json.JSONDecoder(), []
    while lines := lines.strip():
        item, end = decoder.raw_decode(lines)
        items.append(item)
        lines = lines[end:]
    expected = paceline.coordinator.generate(text="Once upon a time", max_tokens=5, stop=REQUEST["stop"])
    assert "".join(item["chunk"].get("text", "") for item in items[:-1]) == expected.text
    assert items[-1]["result"]["usage"] == {"promptTokens": 16, "completionTokens": 5}
    assert items[-1]["result"]["finishReason"] == "FINISH_REASON_LENGTH"


# --- Health and signals. --------------------------------------------------------------------------------------------


def health(service: Service, name: str = "") -> int:
    with grpc.insecure_channel(service.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20, wait_for_ready=True).status)


def check_stops(service: Service) -> None:
    assert service.stop() == 0
    assert "SIGTERM: draining" in service.log
    assert "Traceback" not in service.log


def test_a_target_serves_when_it_is_warm_and_stops_on_sigterm(
    processes: Processes, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "home" / "models" / NAME
    folder.parent.mkdir(parents=True)
    # It waits for the default model as long as another process is fetching it.
    with FileLock(folder.parent / f".{NAME}.lock"):
        target = processes.target(env={"PACELINE_HOME": str(tmp_path / "home")})
        assert health(target) == health(target, "paceline.v1.TargetService") == NOT_SERVING
        with grpc.insecure_channel(target.address) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=10)
        shutil.copytree(models / "target", folder)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the model is still being loaded"
    target.wait_until_serving()
    assert health(target) == health(target, "paceline.v1.TargetService") == SERVING
    check_stops(target)


def test_a_worker_that_still_loads_ends_at_once_on_sigterm(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with FileLock(tmp_path / "models" / f".{NAME}.lock"):
        draft = processes.draft("--drafter", "model", "--model", "default", env={"PACELINE_HOME": str(tmp_path)})
        assert health(draft) == health(draft, "paceline.v1.DraftService") == NOT_SERVING
        assert draft.stop() == 0


def test_an_ngram_draft_and_a_coordinator_stop_on_sigterm(processes: Processes, paceline: Paceline) -> None:
    draft = processes.draft()
    draft.wait_until_serving()
    assert health(draft, "paceline.v1.DraftService") == SERVING
    coordinator = processes.coordinator(paceline.target, draft)
    assert health(coordinator) == health(coordinator, "paceline.v1.CoordinatorService") == SERVING
    check_stops(coordinator)
    check_stops(draft)


def test_a_coordinator_without_a_target_is_not_serving(processes: Processes) -> None:
    coordinator = processes._add(Service, "coordinator", ("--target", "127.0.0.1:1", "--draft", ""), None)
    assert health(coordinator) == health(coordinator, "paceline.v1.CoordinatorService") == NOT_SERVING
    check_stops(coordinator)


def test_a_running_stream_may_finish_and_a_second_sigterm_ends_at_once(
    processes: Processes, paceline: Paceline
) -> None:
    coordinator = processes.coordinator(paceline.target, None, "--shutdown-grace-s", "60")
    with coordinator.connected() as stub:
        short = iter(stub.Generate(pb.GenerateRequest(**(ENDLESS | {"max_tokens": 500, "gamma": 0})), timeout=100))
        next(short)
        coordinator.signal(signal.SIGTERM)
        wait_for_log(coordinator, "SIGTERM: draining")
        assert [item.WhichOneof("item") for item in short][-1] == "result"
    assert coordinator._process.wait(30) == 0
    coordinator.restart()
    coordinator.wait_until_serving()
    with coordinator.connected() as stub:
        endless = iter(stub.Generate(pb.GenerateRequest(**(ENDLESS | {"gamma": 0})), timeout=100))
        next(endless)
        coordinator.signal(signal.SIGTERM)
        # The first has to have been seen: two that wait are one.
        wait_for_log(coordinator, "SIGTERM: draining", times=2)
        coordinator.signal(signal.SIGTERM)
        assert coordinator._process.wait(10) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            list(endless)


def wait_for_log(service: Service, words: str, times: int = 1) -> None:
    """Wait until it has logged something so many times, restarts included."""
    give_up_s = time.monotonic() + 60
    while service.log.count(words) < times:
        assert time.monotonic() < give_up_s, service.log
        time.sleep(0.02)


# --- What cannot be served is said in one line. ---------------------------------------------------------------------


def run(kind: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a service that is expected to end by itself."""
    command = [sys.executable, "-m", f"services.{kind}", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | OFFLINE
    )


def check_failure(process: subprocess.Popen[str], *said: str) -> None:
    _, error = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert [words for words in said if words not in error] == [], error
    assert "Traceback" not in error


@pytest.mark.slow
def test_wrong_model_files(models: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(models / "target", tmp_path / "torn")
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    none = tmp_path / "none"
    # Side by side, since most of the time goes into imports.
    target = run("target_worker", "--listen", "127.0.0.1:0", "--model", str(torn))
    draft = run("draft_worker", "--listen", "127.0.0.1:0", "--drafter", "model", "--model", str(none))
    check_failure(target, "paceline-target-worker: ", str(torn))
    check_failure(draft, "paceline-draft-worker: ", str(none))


def test_an_address_that_cannot_be_had(paceline: Paceline) -> None:
    taken, elsewhere = paceline.draft.address, "192.0.2.1:50099"
    started = [
        (run(kind, "--listen", address, "--insecure"), address)
        for kind in ("coordinator", "draft_worker")
        for address in (taken, elsewhere)
    ]
    for process, address in started:
        check_failure(process, f"cannot listen on {address}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-gamma", "65"], ["--max-gamma", "65", "64"]),
        (["--default-gamma", "9", "--max-gamma", "8"], ["--default-gamma is 9", "--max-gamma, 8"]),
        (["--default-deadline-s", "0"], ["--default-deadline-s", "0", "greater than 0"]),
        (["--nonsense", "1"], ["--nonsense"]),
    ],
)
def test_a_wrong_setting(arguments: list[str], said: list[str]) -> None:
    check_failure(run("coordinator", *arguments), *said)
