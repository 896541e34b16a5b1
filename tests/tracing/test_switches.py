"""The standard variables switch it on and off, and a collector that is not there holds nobody up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.tracing.conftest import Traced
from tests.tracing.test_tree import CLIENTS_SPAN, CLIENTS_TRACE, trace_of

SOMEWHERE = "http://127.0.0.1:4317"
# Imports what a coordinator imports, configures it, and tells which signals are on and whether the SDK was needed.
PROBE = """
import sys
from opentelemetry import metrics, trace
import services.coordinator.app
from services.common.rpc.telemetry import configure_telemetry
configure_telemetry("probe", "probe-0")
for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
    print(type(provider).__module__.startswith("opentelemetry.sdk."))
print("opentelemetry.sdk" in sys.modules)
"""
# Long after the two seconds that are allowed, and well before the SDK's own ten.
PROMPT_S = 8.0


@pytest.mark.parametrize(
    ("variables", "traces", "metrics"),
    [
        ({}, False, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": SOMEWHERE}, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": SOMEWHERE}, True, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": SOMEWHERE}, False, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, False, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": SOMEWHERE, "OTEL_TRACES_EXPORTER": "none"}, False, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": SOMEWHERE, "OTEL_METRICS_EXPORTER": "none"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": SOMEWHERE, "OTEL_SDK_DISABLED": "true"}, False, False),
        # The standard: an empty variable is one that is not set.
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_TRACES_EXPORTER": ""}, False, False),
    ],
)
def test_the_variables_say_what_is_exported(variables: dict[str, str], traces: bool, metrics: bool) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | variables
    probe = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True)
    assert probe.stdout.split() == [str(traces), str(metrics), str(traces or metrics)]


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_a_request_that_is_not_traced_says_so(traced: Traced, tmp_path: Path, variables: dict[str, str]) -> None:
    if variables:
        variables = variables | {"OTEL_EXPORTER_OTLP_ENDPOINT": traced.receiver.endpoint}
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(traced.target, traced.draft, env=variables)
        reply = coordinator.generate(text="abc", gamma=1, max_tokens=3, stop={"ignore_eos": True})
        assert reply.result.trace_id == ""
        assert len(reply.tokens) == 3
        assert coordinator.stop() == 0


def test_a_coordinator_that_exports_nothing_hands_the_clients_trace_on(traced: Traced, tmp_path: Path) -> None:
    trace = CLIENTS_TRACE[::-1]
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(traced.target, traced.draft)
        reply = coordinator.generate(
            text="abc", gamma=0, max_tokens=1, metadata={"traceparent": f"00-{trace}-{CLIENTS_SPAN}-01"}
        )
    assert reply.result.trace_id == ""
    spans = traced.receiver.trace(trace, 2)
    assert sorted(span.name for span in spans) == ["paceline.forward", "paceline.queue"]
    assert {span.parent_id for span in spans} == {CLIENTS_SPAN}


def test_what_is_held_is_exported_at_the_end(traced: Traced, tmp_path: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": traced.receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    with Processes(tmp_path) as processes:
        coordinator = processes.coordinator(traced.target, traced.draft, env=variables)
        reply = coordinator.generate(text="abc", gamma=1, max_tokens=3, stop={"ignore_eos": True})
        assert coordinator.stop() == 0
    trace_of(traced, reply)


@pytest.mark.parametrize("collector", ["refuses", "is silent"])
def test_a_missing_collector_does_not_hold_up_the_end(traced: Traced, tmp_path: Path, collector: str) -> None:
    with socket.socket() as listening, Processes(tmp_path) as processes:
        listening.bind(("127.0.0.1", 0))
        if collector == "is silent":
            listening.listen()
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{listening.getsockname()[1]}"}
        coordinator = processes.coordinator(traced.target, traced.draft, env=variables)
        assert coordinator.generate(text="abc", gamma=1, max_tokens=3).result.trace_id
        began_s = time.monotonic()
        assert coordinator.stop() == 0
        assert time.monotonic() - began_s < PROMPT_S
