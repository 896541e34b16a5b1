"""The tree of a request, round by round, with bars on one time axis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from paceline.v1 import coordinator_pb2, worker_pb2

MOST_ROUNDS = 40
_NAME_WIDTH, _TIME_WIDTH, _REMARK_WIDTH, _LEAST_BAR_WIDTH = 14, 12, 30, 20
_WIRE, _QUEUE, _WORK = "░", "▒", "█"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, drawn with one character."""

    start_ms: float
    length_ms: float
    mark: str = _WORK

    @property
    def end_ms(self) -> float:
        """Where it ends."""
        return self.start_ms + self.length_ms


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree; its spans follow one another."""

    name: str
    spans: Sequence[Span]
    style: str
    remark: str = ""

    @property
    def length_ms(self) -> float:
        """From the start of the first span to the end of the last."""
        return self.spans[-1].end_ms - self.spans[0].start_ms


def new_traceparent() -> tuple[str, str]:
    """Return a fresh trace id and the W3C header that asks for it to be sampled."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-01"


def waterfall(result: coordinator_pb2.GenerateResult, trace_id: str, width: int) -> Text:
    """Return the tree of a request.

    Args:
        result: Whose rounds are drawn; their times are the coordinator's and the workers'.
        trace_id: The trace that was asked for.
        width: Columns to fill.
    """
    rounds = result.speculation.per_round
    total_ms = max((each.start_ms + each.total_ms for each in rounds), default=0.0)
    fits = width >= _NAME_WIDTH + _TIME_WIDTH + _REMARK_WIDTH + _LEAST_BAR_WIDTH
    bar_width = max(_LEAST_BAR_WIDTH, width - _NAME_WIDTH - _TIME_WIDTH - 3 - (_REMARK_WIDTH if fits else 0))
    text = Text(no_wrap=True)
    text.append(f"trace {result.trace_id or f'{trace_id} (not traced by this server)'}\n")
    text.append(f"{_WIRE} wire  {_QUEUE} queue  {_WORK} work\n")
    for line in _tree(rounds, total_ms):
        if isinstance(line, str):
            text.append(line + "\n", "dim")
            continue
        text.append(line.name.ljust(_NAME_WIDTH))
        text.append(f"{line.length_ms:,.1f} ms".rjust(_TIME_WIDTH))
        text.append(" │", "dim")
        text.append(_bar(line.spans, total_ms, bar_width), line.style)
        text.append("│", "dim")
        text.append(f" {line.remark}\n" if line.remark and fits else "\n", "dim")
    return text


def _tree(rounds: Sequence[coordinator_pb2.RoundStats], total_ms: float) -> Iterator[Line | str]:
    yield Line("Generate", [Span(0.0, total_ms)], "default", f"{len(rounds)} rounds")
    left_out = max(0, len(rounds) - MOST_ROUNDS)
    head = MOST_ROUNDS // 2 if left_out else len(rounds)
    for position, each in enumerate(rounds):
        if head <= position < head + left_out:
            if position == head:
                yield f"┆ {left_out} rounds left out"
            continue
        yield from _round(each, last=position == len(rounds) - 1)


def _round(stats: coordinator_pb2.RoundStats, *, last: bool) -> Iterator[Line]:
    remark = f"{stats.accepted} of {stats.proposed} kept, {stats.emitted} out{', degraded' if stats.degraded else ''}"
    branch, stem = ("└", " ") if last else ("├", "│")
    name = f"{branch} round {stats.index}"
    yield Line(name, [Span(stats.start_ms, stats.total_ms)], "default", remark)
    verify_ms = stats.start_ms + stats.draft_ms
    if stats.gamma:
        yield _worker_line(f"{stem} ├ propose", stats.start_ms, stats.draft_ms, stats.draft, "green")
    yield _worker_line(f"{stem} ├ verify", verify_ms, stats.verify_ms, stats.target, "cyan")
    yield Line(f"{stem} └ accept", [Span(verify_ms + stats.verify_ms, stats.accept_ms)], "magenta")


def _worker_line(name: str, start_ms: float, length_ms: float, timing: worker_pb2.WorkerTiming, style: str) -> Line:
    """Return a worker's part; its clock says how long, not when, so the wire is halved around it."""
    service_ms = min(timing.service_ms, length_ms)
    queue_ms = min(timing.queue_ms, service_ms)
    wire_ms = (length_ms - service_ms) / 2
    arrival_ms = start_ms + wire_ms
    spans = [
        Span(start_ms, wire_ms, _WIRE),
        Span(arrival_ms, queue_ms, _QUEUE),
        Span(arrival_ms + queue_ms, service_ms - queue_ms),
        Span(arrival_ms + service_ms, wire_ms, _WIRE),
    ]
    return Line(name, spans, style, f"queue {timing.queue_ms:.1f}, forward {timing.forward_ms:.1f}")


def _bar(spans: Sequence[Span], total_ms: float, width: int) -> str:
    """Return a line's bar, each cell with the mark that takes most of it; however short, it has one cell."""
    if total_ms <= 0:
        return " " * width
    scale = width / total_ms
    first = min(width - 1, round(spans[0].start_ms * scale))
    end = min(width, round(spans[-1].end_ms * scale))
    if end <= first + 1:
        marks = max(spans, key=lambda span: span.length_ms).mark
    else:
        marks = "".join(_mark(spans, cell / scale, (cell + 1) / scale) for cell in range(first, end))
    return (" " * first + marks).ljust(width)


def _mark(spans: Sequence[Span], start_ms: float, end_ms: float) -> str:
    return max(spans, key=lambda span: min(span.end_ms, end_ms) - max(span.start_ms, start_ms)).mark
