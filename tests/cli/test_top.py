"""`paceline top`: what it makes of metrics pages, and what it says where there are none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.cli.pages import LOCAL_PAGES, PageError, Window, parse_page, read_page
from services.cli.pods import Pod, pods_view
from services.cli.up import metrics_pages
from tests.cli.conftest import Paceline
from tests.support.models import make_tiny_llama
from tests.support.processes import Processes
from tests.tracing.test_metrics_page import free_address


def coordinators_page(
    tokens: float = 0, rounds: float = 0, *, name: str = "c-0", started: float = 1.0, running: int = 2
) -> str:
    """Return a page; a round takes 20 ms, asks for three drafts and has one of two tested kept."""
    return f"""\
target_info{{service_name="paceline-coordinator",service_instance_id="{name}"}} 1
process_start_time_seconds {started}
paceline_requests_running {running}
paceline_requests_limit 128
paceline_requests_waiting 1
paceline_tokens_emitted_total {tokens}
paceline_rounds_total {rounds}
paceline_tokens_asked_total {3 * rounds}
paceline_tokens_tested_total {2 * rounds}
paceline_tokens_accepted_total {rounds}
paceline_rounds_degraded_total{{reason="draft late"}} {rounds / 10}
paceline_rounds_degraded_total{{reason="draft lost"}} {rounds / 10}
# TYPE paceline_round_duration_seconds histogram
paceline_round_duration_seconds_bucket{{phase="total",le="0.01"}} 0
paceline_round_duration_seconds_bucket{{phase="total",le="0.03"}} {rounds}
paceline_round_duration_seconds_bucket{{phase="total",le="+Inf"}} {rounds}
paceline_round_duration_seconds_sum{{phase="total"}} {0.02 * rounds}
paceline_round_duration_seconds_count{{phase="total"}} {rounds}
"""


def window(before: str, after: str, elapsed_s: float = 2.0) -> Window:
    return Window([(parse_page(before, 10.0), parse_page(after, 10.0 + elapsed_s))])


TOKENS, ROUNDS = "paceline_tokens_emitted_total", "paceline_rounds_total"


def test_rates_and_ratios_are_of_what_happened_in_between() -> None:
    seen = window(coordinators_page(1000, 400), coordinators_page(1050, 420))
    assert seen.rate(TOKENS) == 25
    assert seen.ratio(TOKENS, ROUNDS) == 2.5
    assert seen.grown("paceline_rounds_degraded_total") == pytest.approx(4)
    assert seen.grown("paceline_rounds_degraded_total", reason="draft late") == pytest.approx(2)
    assert seen.gauge("paceline_requests_running") == 2


def test_what_there_is_not_is_not_zero() -> None:
    idle = window(coordinators_page(1000, 400), coordinators_page(1000, 400))
    assert idle.rate(TOKENS) == 0
    assert idle.ratio(TOKENS, ROUNDS) is None
    assert idle.quantile(0.99, "paceline_round_duration_seconds_bucket", phase="total") is None
    assert idle.rate("paceline_worker_passes_total") is None
    first = window(coordinators_page(1000, 400), coordinators_page(1000, 400), elapsed_s=0)
    assert first.rate(TOKENS) is None


def test_a_process_that_was_started_anew_counts_from_zero() -> None:
    # Also where it has soon done more than the one before.
    for now in (30, 5000):
        assert window(coordinators_page(1000), coordinators_page(now, started=2.0)).grown(TOKENS) == now
    # And where the system does not say when a process began.
    without = [coordinators_page(n).replace("process_start_time_seconds 1.0\n", "") for n in (1000, 30)]
    assert window(*without).grown(TOKENS) == 30


def test_a_quantile_lies_within_its_bucket() -> None:
    name = "paceline_round_duration_seconds_bucket"
    seen = window(coordinators_page(0, 100), coordinators_page(0, 300))
    assert seen.quantile(0.5, name, phase="total") == pytest.approx(0.02)
    assert seen.quantile(0.99, name, phase="total") == pytest.approx(0.0298)
    beyond = 'x_bucket{le="1"} 1\nx_bucket{le="+Inf"} 4\npaceline_x 1\n'
    assert window("paceline_x 1\n", beyond).quantile(0.99, "x_bucket") == 1


def test_pods_are_summed_before_they_are_divided() -> None:
    busy = (parse_page(coordinators_page(0, 0), 0), parse_page(coordinators_page(300, 100), 1))
    calm = (parse_page(coordinators_page(0, 0), 0), parse_page(coordinators_page(10, 10), 2))
    both = Window([busy, calm])
    assert both.ratio(TOKENS, ROUNDS) == pytest.approx(310 / 110)
    assert both.rate(TOKENS) == 305


@contextmanager
def page_server(answer: Callable[[], tuple[int, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((503, ""), "HTTP 503"),
        ((200, "<html>"), "answers, but not with metrics"),
        ((200, "node_load1 0.3\n"), "answers, but is no Paceline service"),
        ((200, ""), "answers, but is no Paceline service"),
    ],
)
def test_what_is_no_page_of_ours_is_told(answer: tuple[int, str], told: str) -> None:
    with page_server(lambda: answer) as address, pytest.raises(PageError, match=f"^{told}$"):
        read_page(address, 5)


def test_an_address_that_is_none_is_told() -> None:
    for wrong in ("nowhere", "127.0.0.1:port", "127.0.0.1:99999", "ftp://127.0.0.1"):
        with pytest.raises(PageError):
            read_page(wrong, 5)


def view(pods: list[Pod], width: int) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(pods_view(pods, console))
        return console.export_text()


def seen_twice(address: str, *pages: str) -> Pod:
    pod = Pod(address)
    for at, page in enumerate(pages):
        pod.seen(parse_page(page, float(at)))
    return pod


def test_a_pod_that_goes_down_is_told_and_forgotten_by_nobody() -> None:
    pod = seen_twice("10.0.0.1:9464", coordinators_page(0, 0, name="c-1"), coordinators_page(40, 20, name="c-1"))
    pod.missed("Connection refused")
    text = view([pod, seen_twice("10.0.0.2:9464", coordinators_page(), coordinators_page(70, 20))], 200)
    assert "10.0.0.1:9464, paceline-coordinator c-1, is down: Connection refused" in text
    assert "c-0" in text
    pod.seen(parse_page(coordinators_page(100, 50, name="c-1"), 4.0))
    # What it did while it was not seen counts: 60 tokens in 3 s, beside 70 in 1.
    assert "90.0" in view([pod, seen_twice("b", coordinators_page(), coordinators_page(70, 20))], 200)


@pytest.mark.parametrize("width", [200, 100, 80, 50])
def test_a_narrow_terminal_has_fewer_columns_and_whole_ones(width: int) -> None:
    text = view([seen_twice("a", coordinators_page(1000, 400), coordinators_page(1050, 420))], width)
    assert max(map(len, text.splitlines())) <= width
    for title in ("running", "tokens/s", "alpha", "gamma"):
        assert title in text
    assert ("accept ms" in text) == (width == 200)
    assert "…" not in text
    for figure in ("2/128", "50.0", "0.50", "3.0"):
        assert figure in text


def test_once_is_one_table_of_one_interval(paceline: Paceline) -> None:
    pages = iter([coordinators_page(1000, 400), coordinators_page(1060, 420)])
    with page_server(lambda: (200, next(pages))) as address:
        result = paceline("top", "--once", "--interval", "0.1", address, "127.0.0.1:1")
    assert result.exit_code == 0
    assert result.output.count("coordinators") == 1
    # A pipe has no colours, and every column.
    assert "\x1b" not in result.output
    assert "accept ms" in result.output
    assert "3.00" in result.output
    assert "127.0.0.1:1 is down: Connection refused" in result.output


def test_where_nobody_answers_it_says_so_and_fails(paceline: Paceline) -> None:
    result = paceline("top", "--once", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1 is down: Connection refused" in result.output


def test_up_has_its_pages_where_top_looks_or_where_there_is_room() -> None:
    with socket.socket() as taken:
        host, _, port = LOCAL_PAGES[1].rpartition(":")
        try:
            taken.bind((host, int(port)))
            taken.listen()
        except OSError:
            pass  # Somebody else listens there, which is as good.
        coordinator, draft, target = metrics_pages({"PACELINE_TARGET_METRICS_LISTEN": "10.0.0.1:1"})
    assert coordinator.startswith("127.0.0.1:")
    assert draft.startswith("127.0.0.1:")
    assert draft != LOCAL_PAGES[1]
    assert target == "10.0.0.1:1"


def test_real_pods_have_all_that_it_shows(paceline: Paceline, tmp_path: Path) -> None:
    pages = [free_address() for _ in range(3)]
    with Processes(tmp_path) as run:
        target = run.target("--model", str(make_tiny_llama(tmp_path / "model")), "--metrics-listen", pages[0])
        draft = run.draft("--drafter", "ngram", "--metrics-listen", pages[1])
        coordinator = run.coordinator(target, draft, "--metrics-listen", pages[2], "--worker-id", "c-0")
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                # The same again and again, so that some drafts are looked at.
                coordinator.generate(text="abcabcabc", max_tokens=60, gamma=2, stop={"ignore_eos": True})

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            result = paceline("top", "--once", "--interval", "5", *pages)
        finally:
            stop.set()
            asking.join()
    assert result.exit_code == 0, result.output
    lines = {
        name: line for line in result.output.splitlines() for name in ("c-0", "(target)", "(draft)") if name in line
    }
    # But the speed-up: it is of requests whose gamma adapts.
    assert lines["c-0"].count("–") == 1
    assert "–" not in lines["(target)"]
    # Guesses by looking up take no passes.
    assert "0/64" in lines["(draft)"] or "1/64" in lines["(draft)"]
