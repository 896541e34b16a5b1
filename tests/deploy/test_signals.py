"""Autoscaling goes by metrics that the code has, within limits that its settings have."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.contract import SERVICES, Document, built, container_of, get, settings_of
from tests.deploy.signals import ADAPTER, Series, adapter_rules, hpa_signals, keda_signals, read, unknown

SCALED = {
    name: built(name)
    for name in ("components/autoscaling", "components/autoscaling-keda", "overlays/gpu-autoscaled", "overlays/trial")
}
KINDS = {"HorizontalPodAutoscaler": hpa_signals, "ScaledObject": keda_signals}


@pytest.fixture(params=SCALED)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return copy.deepcopy(SCALED[request.param])


def scaler_of(documents: list[Document], name: str) -> Document:
    """Return what scales a Deployment."""
    (found,) = (d for d in documents if d["kind"] in KINDS and d["spec"]["scaleTargetRef"]["name"] == name)
    return found


def queries(documents: list[Document]) -> list[str]:
    """Return the queries that are asked on behalf of scalers, PromQL each."""
    found = []
    for name in SERVICES:
        scaler = scaler_of(documents, name)
        rules = adapter_rules() if scaler["kind"] == "HorizontalPodAutoscaler" else {}
        found += [rules.get(signal, signal) for signal in KINDS[scaler["kind"]](scaler) if signal != "cpu"]
    return found


def test_every_series_is_shown_by_the_code(documents: list[Document], pages: list[Series]) -> None:
    asked = queries(documents)
    assert len(asked) >= 5
    assert all(read(query) for query in asked)
    assert [fault for query in asked for fault in unknown(query, pages)] == []


def test_the_adapters_rules_find_their_series(pages: list[Series]) -> None:
    text = ADAPTER.read_text()
    found = [line.split("'")[1] for line in text.splitlines() if "seriesQuery" in line]
    assert len(found) == len(adapter_rules())
    for query in found:
        (series,) = read(query)
        assert series.name in {page.name for page in pages}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("sum(paceline_request_running)", "paceline_request_running{}"),
        ('sum(paceline_worker_sessions{state="queued"})', "paceline_worker_sessions{'state': 'queued'}"),
        ("1 / clamp_min(sum(rate(paceline_worker_pass_total[1m])), 1)", "paceline_worker_pass_total{}"),
    ],
)
def test_a_series_that_the_code_has_not_is_noticed(query: str, message: str, pages: list[Series]) -> None:
    assert unknown(query, pages) == [message]


def test_what_is_scaled_has_no_number_of_its_own(documents: list[Document]) -> None:
    for name in SERVICES:
        assert "replicas" not in get(documents, "Deployment", name)["spec"]
        assert scaler_of(documents, name)["metadata"]["name"] == name


def test_a_pod_is_asked_for_before_a_limit_is_reached(documents: list[Document]) -> None:
    limits = {}
    for name, field in (("coordinator", "max_requests"), ("draft-worker", "max_sessions")):
        limits[name] = getattr(settings_of(container_of(documents, name), SERVICES[name]), field)
        signals = KINDS[scaler_of(documents, name)["kind"]](scaler_of(documents, name))
        (amount,) = (amount for signal, amount in signals.items() if signal != "cpu")
        assert 0.5 * limits[name] <= amount <= 0.8 * limits[name], name
        assert 50 <= signals["cpu"] <= 85
    sessions = settings_of(container_of(documents, "target-worker"), SERVICES["target-worker"]).max_sessions
    share, batch, waiting = KINDS[scaler_of(documents, "target-worker")["kind"]](
        scaler_of(documents, "target-worker")
    ).values()
    assert (share, waiting) == (0.7, 1)
    assert 0.5 * sessions <= batch <= 0.8 * sessions


def test_pods_go_one_at_a_time(documents: list[Document]) -> None:
    for name in SERVICES:
        spec = scaler_of(documents, name)["spec"]
        behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        (policy,) = behavior["scaleDown"]["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] == policy["periodSeconds"] >= 300
        if name == "coordinator":
            settings = settings_of(container_of(documents, name), SERVICES[name])
            assert policy["periodSeconds"] >= settings.max_deadline_s


def test_both_components_do_the_same() -> None:
    ours, kedas = SCALED["components/autoscaling"], SCALED["components/autoscaling-keda"]
    for name in SERVICES:
        hpa, keda = scaler_of(ours, name), scaler_of(kedas, name)
        assert hpa["spec"]["minReplicas"] == keda["spec"]["minReplicaCount"] >= 2
        assert hpa["spec"]["maxReplicas"] == keda["spec"]["maxReplicaCount"]
        assert hpa["spec"]["behavior"] == keda["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert list(hpa_signals(hpa).values()) == list(keda_signals(keda).values())
        by_rule = [{s.name for s in read(adapter_rules()[signal])} for signal in hpa_signals(hpa) if signal != "cpu"]
        assert by_rule == [{s.name for s in read(query)} for query in keda_signals(keda) if query != "cpu"]
        assert all(f'namespace="{keda["metadata"]["namespace"]}"' in q for q in keda_signals(keda) if q != "cpu")


def test_a_queries_component_is_the_one_that_is_scaled() -> None:
    for name in ("draft-worker", "target-worker"):
        for query in keda_signals(scaler_of(SCALED["overlays/trial"], name)):
            if query != "cpu":
                assert {series.labels["app_kubernetes_io_component"] for series in read(query)} == {name}
    (monitor,) = (d for d in SCALED["overlays/trial"] if d["kind"] == "PodMonitor")
    assert monitor["spec"]["podTargetLabels"] == ["app.kubernetes.io/component"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in SERVICES:
        pod = get(SCALED["overlays/trial"], "Deployment", name)["spec"]["template"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
