"""The alerts fire where they should and stay silent where not, by promtool, and go by metrics that the code has."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.check import ROOT
from tests.deploy.contract import built, get
from tests.deploy.signals import Series, read, unknown
from tests.support.prometheus import tool

CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("alerts.yaml").read_text())
SPEC: dict[str, Any] = get(built("components/monitoring"), "PrometheusRule", "paceline")["spec"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in SPEC["groups"] for rule in group["rules"]}
# What promtool has to notice: an alert, what it says, and what it would say then.
MUTATIONS = [
    ("PacelineTargetDown", "max by", "min by"),
    ("PacelineTargetDown", "== 0", "< 2"),
    ("PacelineDraftDown", '"draft"', '"target"'),
    ("PacelineDraftDown", "== 0", "== 1"),
    ("PacelineAlphaCollapsed", "0.5 *", "0.7 *"),
    ("PacelineAlphaCollapsed", "0.5 *", "0.3 *"),
    ("PacelineAlphaCollapsed", "> 200", "> 100"),
    ("PacelineTargetFull", '"waiting"', '"open"'),
    ("PacelineTargetFull", "> 0", "> 3"),
    ("PacelineTargetFull", '"target-worker"', '"draft-worker"'),
    ("PacelineNotFinite", "> 0", "> 1"),
    ("PacelineNotFinite", "> 0", ">= 0"),
    ("PacelineRoundsSlow", "> 2.5", "> 4"),
    ("PacelineRoundsSlow", "0.99", "0.999"),
    ("PacelineRoundsSlow", '="total"', '=~".+"'),
    ("PacelineRequestsFail", "> 0.05", "> 0.03"),
    ("PacelineRequestsFail", "> 0.05", "> 0.1"),
    ("PacelineRequestsFail", "INTERNAL", "CANCELLED|INTERNAL"),
]


def told(folder: Path, rules: dict[str, dict[str, Any]], alert: str) -> str:
    """Return what promtool finds wrong with an alert; empty where it does as its cases say."""
    cases = [case for case in CASES["tests"] if any(of["alertname"] == alert for of in case["alert_rule_test"])]
    assert cases, f"{alert} has no case"
    (folder / "alerts").write_text(yaml.safe_dump({"groups": [{"name": "paceline", "rules": [rules[alert]]}]}))
    (folder / "test").write_text(yaml.safe_dump({**CASES, "tests": cases}))
    done = subprocess.run([tool("promtool"), "test", "rules", folder / "test"], capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def test_the_rules_are_rules(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text(yaml.safe_dump(SPEC))
    done = subprocess.run([tool("promtool"), "check", "rules", tmp_path / "rules"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_fires_and_stays_silent(tmp_path: Path, alert: str) -> None:
    assert told(tmp_path, RULES, alert) == ""


@pytest.mark.parametrize(("alert", "said", "instead"), MUTATIONS)
def test_another_threshold_is_noticed(tmp_path: Path, alert: str, said: str, instead: str) -> None:
    rules = copy.deepcopy(RULES)
    assert said in rules[alert]["expr"]
    rules[alert]["expr"] = rules[alert]["expr"].replace(said, instead)
    assert "FAILED" in told(tmp_path, rules, alert)


@pytest.mark.parametrize("alert", [alert for alert, rule in RULES.items() if "for" in rule])
@pytest.mark.parametrize("instead", ["0s", "3h"])
def test_another_patience_is_noticed(tmp_path: Path, alert: str, instead: str) -> None:
    rules = copy.deepcopy(RULES)
    rules[alert]["for"] = instead
    assert "FAILED" in told(tmp_path, rules, alert)


def test_every_series_is_shown_by_the_code(pages: list[Series]) -> None:
    read_by = {alert: read(rule["expr"]) for alert, rule in RULES.items()}
    assert all(read_by.values())
    assert {alert: faults for alert, rule in RULES.items() if (faults := unknown(rule["expr"], pages))} == {}


def test_the_guide_says_what_each_alert_asks_for() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text()
    assert [alert for alert in RULES if f"| `{alert}` |" not in guide] == []
