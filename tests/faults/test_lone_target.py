"""The only target that there is, as a real process: replaced by another model, cut off repeatedly, lost for good."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.faults.conftest import OFFLINE
from tests.faults.load import check_same, lost, requests, under_load
from tests.support.cluster import Reply
from tests.support.processes import Coordinator, Processes, Service

pytestmark = pytest.mark.slow
PLAIN = worker_pb2.SamplingParams(temperature=1.0)
LENGTH = 200
FLOAT32 = ("--dtype", "float32")
RETRY_S = 3.0
REPO = str(Path(__file__).parents[2])


class CuttingTarget(Service):
    """A target whose connections are short-lived."""

    package = "tests.faults.cutting"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("logs"), OFFLINE) as run:
        yield run


@pytest.fixture(scope="module")
def target(run: Processes, models: Path) -> Service:
    return run.target("--model", str(models / "target"), *FLOAT32)


@pytest.fixture(scope="module")
def coordinator(run: Processes, target: Service) -> Coordinator:
    return run.coordinator(target, None, "--target-retry-s", "600")


@pytest.fixture(scope="module")
def sampled(coordinator: Coordinator) -> list[Reply]:
    """The undisturbed answers."""
    return under_load(coordinator, requests(sampling=PLAIN, max_tokens=LENGTH))


def test_running_requests_never_mix_two_models(
    coordinator: Coordinator, target: Service, models: Path, sampled: list[Reply]
) -> None:
    """Another model takes the address: they wait for their own; new requests are the new one's."""
    asked = requests(sampling=PLAIN, max_tokens=LENGTH)
    of_other: list[Reply] = []

    def replace_and_bring_back() -> None:
        target.kill()
        target.restart("--model", str(models / "other"), *FLOAT32)
        target.wait_until_serving()
        wait_for_log(coordinator, "this worker serves other float32")
        wait_for_log(coordinator, "target: other float32")
        of_other.extend(under_load(coordinator, asked[:2]))
        target.kill()
        target.restart("--model", str(models / "target"), *FLOAT32)
        target.wait_until_serving()

    replies = under_load(coordinator, asked, replace_and_bring_back)
    check_same(replies, sampled)
    assert {reply.result.target.model_id for reply in replies} == {"target"}
    assert {reply.result.target.model_id for reply in of_other} == {"other"}
    for reply, other in zip(sampled, of_other, strict=False):
        assert reply.tokens[:20] != other.tokens[:20]


def wait_for_log(service: Service, words: str) -> None:
    give_up_s = time.monotonic() + 60
    while words not in service.log:
        assert time.monotonic() < give_up_s, service.log
        time.sleep(0.05)


def test_connections_that_are_cut_in_mid_text(run: Processes, models: Path, sampled: list[Reply]) -> None:
    age = ("--max-connection-age-s", "1")
    model = ("--model", str(models / "target"), *FLOAT32)
    target = run._add(CuttingTarget, "target_worker", (*model, *age), {"PYTHONPATH": REPO})
    coordinator = run.coordinator(target, None, "--target-retry-s", "600")
    replies = under_load(coordinator, requests(sampling=PLAIN, max_tokens=LENGTH))
    check_same(replies, sampled)
    assert lost(coordinator, "target") >= 1
    target.close()


def test_a_second_sigterm_ends_a_worker_at_once(run: Processes, target: Service) -> None:
    """Though a stream is open that the first one lets go on."""
    draft = run.draft()
    coordinator = run.coordinator(target, draft, "--target-retry-s", "0")
    with coordinator.connected() as stub:
        call = stub.Generate(requests(sampling=PLAIN, max_tokens=3_900)[0], timeout=100)
        next(iter(call))
        for worker in (draft, target):
            worker.signal(signal.SIGTERM)
            wait_for_log(worker, "SIGTERM: draining")
            worker.signal(signal.SIGTERM)
            assert worker._process.wait(10) == 128 + signal.SIGTERM
        call.cancel()
    target.restart()


def test_a_target_that_is_killed_and_stays_away(run: Processes, target: Service) -> None:
    """Every stream is told, and in time."""
    coordinator = run.coordinator(target, None, "--target-retry-s", f"{RETRY_S:g}")
    asked = requests(sampling=PLAIN, max_tokens=3_000)
    under_way = threading.Barrier(len(asked) + 1)

    def until_it_fails(request: pb.GenerateRequest) -> tuple[grpc.RpcError, float]:
        with coordinator.connected() as stub:
            call = stub.Generate(request, timeout=100)
            next(iter(call))
            under_way.wait(60)
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
        return caught.value, time.monotonic()

    with ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(until_it_fails, request) for request in asked]
        under_way.wait(60)
        killed_s = time.monotonic()
        target.kill()
        ended = [failed.result() for failed in running]
    for error, at_s in ended:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no target worker after" in (error.details() or "")
        # The last attempt begins a back-off after the limit at the latest, and takes no longer than one to connect.
        assert RETRY_S <= at_s - killed_s < RETRY_S + 15
