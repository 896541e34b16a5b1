"""The tracing benchmark: what is held against what, and that spans do go somewhere."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from bench.sink import Sink
from bench.tracing_report import OFF, SAMPLED, UNSAMPLED, tables
from tests.bench.fakes import measured


def test_each_way_is_held_against_no_tracing() -> None:
    times = {OFF: 160.0, UNSAMPLED: 160.0, SAMPLED: 200.0}
    records = [
        measured(system, wall_ms * streams, streams=streams, repeat=repeat, unit=unit)
        for system, wall_ms in times.items()
        for streams in (1, 4)
        for repeat in range(3)
        for unit in "ab"
    ]
    (table,) = tables(records)
    assert [row[:3] for row in table.rows] == [
        ("greedy", streams, system) for streams in ("1", "4") for system in (OFF, UNSAMPLED, SAMPLED)
    ]
    off, unsampled, sampled = table.rows[:3]
    # 16 tokens in 160 ms.
    assert off[3:] == ("100.0", "", "", "")
    assert unsampled[4] == "1.000"
    assert unsampled[-1] == "≥ 0.98: met"
    assert sampled[4] == "0.800"
    assert sampled[-1] == "≥ 0.98: missed"


def test_what_is_no_surer_than_noise_is_no_miss() -> None:
    off = [measured(OFF, 100.0, repeat=repeat, unit=unit) for repeat in range(4) for unit in "ab"]
    traced = [
        measured(SAMPLED, wall_ms, repeat=repeat, unit=unit)
        for repeat, wall_ms in enumerate((90.0, 120.0, 95.0, 118.0))
        for unit in "ab"
    ]
    assert tables([*off, *traced])[0].rows[-1][-1] == "≥ 0.98: within noise"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_sink_takes_what_an_exporter_sends() -> None:
    with Sink() as sink:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sink.endpoint, insecure=True)))
        provider.get_tracer("test").start_span("span").end()
        provider.shutdown()
        assert sink.received > 0
