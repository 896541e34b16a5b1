"""Write the Grafana dashboard: `python deploy/dashboard.py`, after which the JSON beside the manifests is committed.

With `--check`, as `make lint` calls it, nothing is written, and it fails if that JSON is not what would be.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableOption, VariableRefresh

PATH = Path(__file__).parent / "k8s" / "components" / "monitoring" / "dashboard.json"
_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
_NAMESPACE = 'namespace=~"$namespace"'
_WIDTH = 24
_TARGETS = 'app_kubernetes_io_component="target-worker"'

Panel: TypeAlias = timeseries.Panel | stat.Panel


class Query(NamedTuple):
    """A query, and the name of its lines; `{{label}}` in it is a label's value."""

    expr: str
    legend: str


# PromQL. A metric is named as on the page, without the prefix that is common to all.
def _rate(metric: str, by: str = "", where: str = "") -> str:
    """Return what is counted a second, over all pods, by labels."""
    return _sum(f"rate({_series(metric, where)}[$__rate_interval])", by)


def _gauge(metric: str, by: str = "", where: str = "") -> str:
    """Return a gauge, over all pods, by labels."""
    return _sum(_series(metric, where), by)


def _share(part: str, whole: str, by: str = "", where: str = "") -> str:
    """Return one rate over another, both by the same labels."""
    return f"{_rate(part, by, where)} / {_rate(whole, by, where)}"


def _each_of(parts: str, whole: str, label: str) -> str:
    """Return parts over their whole, which lacks the label that tells the parts apart."""
    return f"{parts} / ignoring({label}) group_left {whole}"


def _quantile(share: float, histogram: str, by: str = "", where: str = "") -> str:
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', labels, where)})"


def _series(metric: str, where: str) -> str:
    name = metric if metric.startswith("gen_ai_") else f"paceline_{metric}"
    labels = ", ".join(filter(None, (_NAMESPACE, where)))
    return f"{name}{{{labels}}}"


def _sum(expr: str, by: str) -> str:
    return f"sum by ({by}) ({expr})" if by else f"sum({expr})"


def _percentiles(histogram: str, by: str = "", where: str = "") -> list[Query]:
    name = f" {{{{{by}}}}}" if by else ""
    return [Query(_quantile(share, histogram, by, where), f"p{share * 100:g}{name}") for share in (0.5, 0.99)]


_ALPHA = _share("tokens_accepted_total", "tokens_tested_total")
_TOKENS_A_PASS = _share("tokens_emitted_total", "rounds_total")
_DEGRADED = _share("rounds_degraded_total", "rounds_total")
_ALONE, _SPENT = (_rate("speculation_time_seconds_total", where=f'of="{of}"') for of in ("alone", "spent"))
_SPEED_UP = f"{_ALONE} / {_SPENT}"
_RESERVED = _gauge("worker_kv_tokens", where=f'state="reserved", {_TARGETS}')
_CACHE_SHARE = f"{_RESERVED} / {_gauge('worker_kv_tokens', where=_TARGETS)}"


def build() -> str:
    """Return the dashboard as JSON."""
    rows = {
        "At a glance": [
            _stat("Tokens a second", "none", _rate("tokens_emitted_total")),
            _stat("Alpha", "percentunit", _ALPHA),
            _stat("Tokens a pass", "none", _TOKENS_A_PASS),
            _stat("Speed-up against gamma 0", "x", _SPEED_UP),
            _stat("Rounds without all drafts", "percentunit", _DEGRADED),
            _stat("Round, p99", "s", _quantile(0.99, "round_duration_seconds", where='phase="total"')),
            _stat("Requests waiting", "none", _gauge("requests_waiting")),
            _stat("KV cache of targets", "percentunit", _CACHE_SHARE),
        ],
        "Requests": _requests(),
        "Speculation": _speculation(),
        "Rounds": _rounds(),
        "Workers": _workers(),
    }
    board = (
        dashboard.Dashboard("Paceline")
        .uid("paceline")
        .description("Speculative decoding as a service. What each number is: docs/operations.md.")
        .tags(["paceline"])
        .readonly()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .label("Namespace")
            .datasource(_SOURCE)
            .query("label_values(paceline_rounds_total, namespace)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(text="All", value="$__all"))
        )
    )
    ids = itertools.count(1)
    for title, panels in rows.items():
        board.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            board.with_panel(panel.id(next(ids)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _requests() -> list[Panel]:
    return [
        _lines("Tokens of answers", "none", [Query(_rate("tokens_emitted_total", "pod"), "{{pod}}")], is_stacked=True),
        _lines(
            "Requests being served",
            "none",
            [
                Query(_gauge("requests_running"), "running"),
                Query(_gauge("requests_waiting"), "waiting for a first token"),
                Query(_gauge("requests_limit"), "limit"),
            ],
        ),
        _lines("Requests ended, a second", "reqps", [Query(_rate("requests_ended_total", "status"), "{{status}}")]),
        _lines("Time to the first token", "s", _percentiles("gen_ai_server_time_to_first_token_seconds")),
        _lines("Time of a token after that", "s", _percentiles("gen_ai_server_time_per_output_token_seconds")),
        _lines("Time of a request", "s", _percentiles("gen_ai_server_request_duration_seconds")),
    ]


def _speculation() -> list[Panel]:
    return [
        _lines("Alpha: drafts kept of those tested", "percentunit", [Query(_ALPHA, "alpha")], most=1),
        _lines(
            "Drafts kept of those tested, by position",
            "percentunit",
            [
                # A position that has not been reached of late has no line, and not one of 0 / 0.
                Query(
                    f"{_rate('tokens_accepted_per_position_total', 'position')}"
                    f" / ({_rate('tokens_tested_per_position_total', 'position')} > 0)",
                    "{{position}}",
                )
            ],
            most=1,
        ),
        _lines(
            "Tokens a pass of the target",
            "none",
            [
                Query(_TOKENS_A_PASS, "tokens"),
                Query(_share("tokens_asked_total", "rounds_total"), "drafts asked for (gamma)"),
                Query(_share("tokens_proposed_total", "rounds_total"), "drafts that came"),
            ],
        ),
        _lines("Speed-up against gamma 0, estimated", "x", [Query(_SPEED_UP, "speed-up")]),
        _lines(
            "Rounds with fewer drafts than there should have been",
            "percentunit",
            [
                Query(
                    _each_of(_rate("rounds_degraded_total", "reason"), _rate("rounds_total"), "reason"),
                    "{{reason}}",
                )
            ],
        ),
        _lines(
            "Share of rounds while which drafting went on",
            "percentunit",
            [
                Query(
                    _each_of(_rate("rounds_ran_ahead_total", "kept"), _rate("rounds_total"), "kept"),
                    "kept: {{kept}}",
                )
            ],
        ),
    ]


def _rounds() -> list[Panel]:
    calls = _each_of(_rate("call_time_seconds_total", "worker, part"), _rate("calls_total", "worker"), "part")
    trouble = [
        Query(_rate("workers_lost_total", "worker, status"), "{{worker}} lost: {{status}}"),
        Query(_rate("verify_retries_total"), "verified again"),
        Query(_rate("rows_bad_total", "worker"), "{{worker}}: bad rows"),
        Query(_rate("server_refused_total", "status"), "refused: {{status}}"),
    ]
    phases = [
        Query(_quantile(share, "round_duration_seconds", "phase"), f"p{share * 100:g} {{{{phase}}}}")
        for share in (0.5, 0.99)
    ]
    return [
        _lines("Time of a round, median by phase", "s", phases[:1]),
        _lines("Time of a round, 99th percentile by phase", "s", phases[1:]),
        _lines("Mean time of a worker's call, by part", "s", [Query(calls, "{{worker}} {{part}}")]),
        _lines(
            "Messages to and from workers",
            "Bps",
            [Query(_rate("payload_io_bytes_total", "worker, direction"), "{{worker}} {{direction}}")],
        ),
        _lines("Trouble, a second", "none", trouble),
        _lines(
            "Coordinators that find a worker",
            "none",
            [
                Query(_gauge("workers_found", "worker"), "{{worker}}"),
                Query(f"count({_series('requests_limit', '')})", "coordinators"),
            ],
        ),
    ]


def _workers() -> list[Panel]:
    sessions = [
        Query(
            _gauge("worker_sessions", "app_kubernetes_io_component, state"), "{{app_kubernetes_io_component}} {{state}}"
        ),
        Query(_gauge("worker_sessions_limit", "app_kubernetes_io_component"), "{{app_kubernetes_io_component}} limit"),
    ]
    batch = [
        Query(_share(f"worker_pass_{what}_total", "worker_passes_total", "pod"), f"{{{{pod}}}} {what}")
        for what in ("sessions", "tokens")
    ]
    fed_again = f"({_rate('worker_prefix_tokens_total', 'pod')} + {_rate('worker_pass_tokens_total', 'pod')})"
    return [
        _lines("Sessions", "none", sessions),
        _lines(
            "KV cache of targets",
            "percentunit",
            [
                Query(
                    _each_of(*(_gauge("worker_kv_tokens", by, _TARGETS) for by in ("pod, state", "pod")), "state"),
                    "{{pod}} {{state}}",
                )
            ],
            most=1,
        ),
        _lines("Sessions, and positions, in a pass", "none", batch),
        _lines("Requests waiting for a pass, or in one", "none", [Query(_gauge("worker_queue", "pod"), "{{pod}}")]),
        _lines(
            "Time at work", "percentunit", [Query(_rate("worker_pass_time_seconds_total", "pod"), "{{pod}}")], most=1
        ),
        _lines(
            "Positions copied from other sessions and not fed",
            "percentunit",
            [Query(f"{_rate('worker_prefix_tokens_total', 'pod')} / {fed_again}", "{{pod}}")],
            most=1,
        ),
    ]


def _stat(title: str, unit: str, expr: str) -> Panel:
    """Return a number, an eighth of the width."""
    return (
        stat.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .decimals(2 if unit != "percentunit" else 0)
        .graph_mode(looks.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_target(Query(expr, title), "A"))
        .height(4)
        .span(_WIDTH // 8)
    )


def _lines(
    title: str, unit: str, queries: Sequence[Query], most: float | None = None, is_stacked: bool = False
) -> Panel:
    """Return lines over time, a third of the width."""
    panel = (
        timeseries.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .min(0)
        .fill_opacity(10)
        .legend(
            common.VizLegendOptions()
            .display_mode(looks.LegendDisplayMode.LIST)
            .placement(looks.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
        .height(8)
        .span(_WIDTH // 3)
    )
    if most is not None:
        panel.max(most)
    if is_stacked:
        panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    for name, query in zip("ABCDEF", queries, strict=False):
        panel.with_target(_target(query, name))
    return panel


def _target(query: Query, name: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(name)
    return made.datasource(_SOURCE).range()


def main(arguments: Sequence[str]) -> int:
    """Write the dashboard, or check the one that is there; return the exit status."""
    made = build()
    if "--check" not in arguments:
        PATH.write_text(made)
    elif not PATH.exists() or PATH.read_text() != made:
        sys.stdout.write(f"{PATH.name} is not what deploy/dashboard.py makes: run it\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
