"""The dashboard is what deploy/dashboard.py makes, and asks for metrics that the code has, in PromQL."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import dashboard
from tests.deploy.contract import built, get
from tests.deploy.signals import Series, dashboard_queries, read, unknown
from tests.support.prometheus import tool

BOARD: dict[str, Any] = json.loads(dashboard.PATH.read_text())
QUERIES = dashboard_queries()
# What the page has to tell of speculation, by the metrics that tell it.
SHOWN = {
    "alpha": {"paceline_tokens_accepted_total", "paceline_tokens_tested_total"},
    "accepted per position": {"paceline_tokens_accepted_per_position_total"},
    "tokens a pass": {"paceline_tokens_emitted_total", "paceline_rounds_total"},
    "round latency by phase": {"paceline_round_duration_seconds_bucket"},
    "queue": {"paceline_requests_running", "paceline_requests_waiting", "paceline_worker_queue"},
    "slots": {"paceline_worker_sessions", "paceline_worker_sessions_limit", "paceline_worker_kv_tokens"},
    "batch": {"paceline_worker_pass_sessions_total", "paceline_worker_passes_total"},
    "degraded share": {"paceline_rounds_degraded_total"},
    "payload bytes": {"paceline_payload_io_bytes_total"},
    "speed-up": {"paceline_speculation_time_seconds_total"},
    "bad rows": {"paceline_rows_bad_total"},
    "errors": {"paceline_requests_ended_total", "paceline_verify_retries_total"},
}


def test_the_file_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["--check"]) == 0


def test_a_stale_file_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard, "PATH", tmp_path / "dashboard.json")
    assert dashboard.main(["--check"]) == 1
    assert dashboard.main([]) == 0
    assert dashboard.main(["--check"]) == 0
    dashboard.PATH.write_text(dashboard.PATH.read_text().replace("rate(", "irate(", 1))
    assert dashboard.main(["--check"]) == 1
    assert "dashboard.json is not what deploy/dashboard.py makes" in capsys.readouterr().out


def test_every_series_is_shown_by_the_code(pages: list[Series]) -> None:
    assert len(QUERIES) > 30
    assert [fault for query in QUERIES for fault in unknown(query, pages)] == []


def test_it_tells_what_it_is_for() -> None:
    names = {series.name for query in QUERIES for series in read(query)}
    assert {what: missing for what, metrics in SHOWN.items() if (missing := metrics - names)} == {}


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"query:{n}", "expr": query} for n, query in enumerate(QUERIES)]
    (tmp_path / "rules").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run([tool("promtool"), "check", "rules", tmp_path / "rules"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(QUERIES)} rules found" in done.stdout


def test_every_panel_has_its_place() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23


def test_every_query_is_of_the_chosen_namespaces_and_source() -> None:
    targets = [target for panel in BOARD["panels"] for target in panel.get("targets", ())]
    assert {target["datasource"]["uid"] for target in targets} == {"$datasource"}
    for target in targets:
        assert len(re.findall(r"[a-z_]+\{", target["expr"])) == target["expr"].count('{namespace=~"$namespace"')
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "namespace"]


def test_grafanas_sidecar_finds_it() -> None:
    found = get(built("components/monitoring"), "ConfigMap", "paceline-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["dashboard.json"]) == BOARD
