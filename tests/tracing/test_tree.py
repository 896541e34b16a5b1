"""One request is one trace across three processes: its tree, attributes and times, as a collector gets them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from paceline.v1 import coordinator_pb2 as pb
from paceline.v1 import worker_pb2
from tests.support.cluster import Reply
from tests.tracing.conftest import Traced
from tests.tracing.receiver import Span

INTERNAL, SERVER = 1, 2
GENERATE = "paceline.v1.CoordinatorService/Generate"
COORDINATOR, DRAFT, TARGET = "paceline-coordinator", "paceline-draft-worker", "paceline-target-worker"
# Times come from clocks of one machine, read by several processes, and durations from another clock.
TOLERANCE_NS = 1_000_000
CLIENTS_TRACE, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass(frozen=True)
class Tree:
    """A request and its spans.

    Attributes:
        reply: What the client was told.
        spans: All of its trace.
        root: Generate.
        children: By the parent's id, in the order of their starts.
    """

    reply: Reply
    spans: list[Span]
    root: Span
    children: dict[str, list[Span]]

    @property
    def rounds(self) -> list[tuple[Span, pb.RoundStats]]:
        """Each round's span, and what the client was told of it."""
        return list(zip(self.children[self.root.span_id], self.reply.result.speculation.per_round, strict=True))

    def child(self, parent: Span, name: str) -> Span:
        """Return the one child with a name."""
        (found,) = (span for span in self.children[parent.span_id] if span.name == name)
        return found


def trace_of(traced: Traced, reply: Reply) -> Tree:
    """Return the tree of a request once all of it has arrived."""
    rounds = reply.result.speculation.per_round
    # Round, verify, accept, and the target's queue and forward; propose, and the draft's; Generate.
    expected = 5 * len(rounds) + 3 * sum(done.gamma > 0 for done in rounds) + 1
    spans = traced.receiver.trace(reply.result.trace_id, expected)
    children = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_ns):
        children[span.parent_id].append(span)
    (root,) = (span for span in spans if span.name == GENERATE)
    return Tree(reply, spans, root, dict(children))


@pytest.fixture(scope="module")
def tree(traced: Traced) -> Tree:
    """A request with drafts kept and rejected, and a last round that has room for none."""

    def ask(seed: int) -> Reply:
        return traced.coordinator.generate(
            text="abcabc",
            gamma=2,
            max_tokens=24,
            seed=seed,
            sampling=worker_pb2.SamplingParams(temperature=1.5),
            stop={"ignore_eos": True},
            request_id=f"tree-{seed}",
        )

    def is_mixed(reply: Reply) -> bool:
        rounds = reply.result.speculation.per_round
        return {done.accepted for done in rounds} == {0, 1, 2} and rounds[-1].gamma == 0

    return trace_of(traced, next(reply for seed in range(200) if is_mixed(reply := ask(seed))))


def test_every_span_is_where_the_design_has_it(tree: Tree) -> None:
    assert tree.root.parent_id == ""
    assert (tree.root.service, tree.root.kind) == (COORDINATOR, SERVER)
    for span, stats in tree.rounds:
        assert (span.name, span.service, span.kind) == ("paceline.round", COORDINATOR, INTERNAL)
        phases = ["paceline.propose"] * (stats.gamma > 0) + ["paceline.verify", "paceline.accept"]
        assert [child.name for child in tree.children[span.span_id]] == phases
        for phase, worker in (("paceline.propose", DRAFT), ("paceline.verify", TARGET)):
            if phase not in phases:
                continue
            passes = tree.children[tree.child(span, phase).span_id]
            assert sorted(child.name for child in passes) == ["paceline.forward", "paceline.queue"]
            assert {child.service for child in passes} == {worker}
    assert Counter(span.name for span in tree.spans)["paceline.round"] == tree.reply.result.speculation.rounds


def test_a_round_says_what_it_did(tree: Tree) -> None:
    length = tree.reply.result.usage.prompt_tokens
    for span, stats in tree.rounds:
        expected = {
            "paceline.round.index": stats.index,
            "paceline.gamma": stats.gamma,
            "paceline.context.length": length,
            "paceline.tokens.proposed": stats.proposed,
            "paceline.tokens.accepted": stats.accepted,
            "paceline.tokens.emitted": stats.emitted,
            "paceline.bonus": 0 < stats.proposed == stats.accepted,
            "paceline.payload.q_bytes": stats.q_bytes,
            "paceline.payload.p_bytes": stats.p_bytes,
            "paceline.rows.fetched": stats.fetched_rows,
            "paceline.degraded": "",
        }
        for kind in ("draft", "target") if stats.gamma else ("target",):
            expected |= {f"paceline.{kind}.worker": f"{kind}-0", f"paceline.{kind}.model": kind}
        if stats.accepted < stats.proposed:
            expected["paceline.rejection.position"] = stats.accepted
        assert span.attributes == expected
        length += stats.emitted


def test_the_workers_say_who_they_are_and_what_they_fed(tree: Tree) -> None:
    for span, stats in tree.rounds:
        for phase, kind, timing in (
            ("paceline.propose", "draft", stats.draft),
            ("paceline.verify", "target", stats.target),
        ):
            if not timing.forward_tokens:
                continue
            who = {f"paceline.{kind}.worker": f"{kind}-0", f"paceline.{kind}.model": kind}
            parent = tree.child(span, phase)
            assert tree.child(parent, "paceline.queue").attributes == who
            forward = tree.child(parent, "paceline.forward")
            assert forward.attributes == who | {
                "paceline.forward.tokens": timing.forward_tokens,
                "paceline.forward.batch_size": timing.batch_size,
                "paceline.forward.reused_tokens": timing.reused_tokens,
            }
            assert forward.resource["service.instance.id"] == f"{kind}-0"


def test_the_request_says_what_it_was(tree: Tree) -> None:
    assert tree.root.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": GENERATE,
        "rpc.response.status_code": "OK",
        "paceline.request.id": tree.reply.result.request_id,
    }
    assert tree.root.resource["service.instance.id"] == "coordinator-0"


def test_every_span_lies_within_its_parent(tree: Tree) -> None:
    by_id = {span.span_id: span for span in tree.spans}
    for span in tree.spans:
        if parent := by_id.get(span.parent_id):
            assert parent.start_ns - TOLERANCE_NS <= span.start_ns <= span.end_ns <= parent.end_ns + TOLERANCE_NS


def test_spans_of_one_parent_follow_each_other_and_fill_it(tree: Tree) -> None:
    for siblings in tree.children.values():
        for before, after in itertools.pairwise(siblings):
            assert before.end_ns <= after.start_ns + TOLERANCE_NS

    def total_ns(belongs: Callable[[Span], bool]) -> int:
        return sum(span.duration_ns for span in tree.spans if belongs(span))

    rounds_ns = total_ns(lambda span: span.name == "paceline.round")
    phases_ns = total_ns(lambda span: span.name in ("paceline.propose", "paceline.verify", "paceline.accept"))
    assert rounds_ns <= tree.root.duration_ns + TOLERANCE_NS
    # A round is its phases and a little arithmetic.
    assert 0.5 * rounds_ns <= phases_ns <= rounds_ns + TOLERANCE_NS * len(tree.rounds)


def test_spans_and_the_result_tell_the_same_times(tree: Tree) -> None:
    for span, stats in tree.rounds:
        verify = tree.child(span, "paceline.verify")
        forward = tree.child(verify, "paceline.forward")
        assert forward.duration_ns == pytest.approx(stats.target.forward_ms * 1e6, abs=TOLERANCE_NS)
        # A span begins before and ends after what the result counts.
        assert span.duration_ns >= stats.total_ms * 1e6 - TOLERANCE_NS
        assert verify.duration_ns >= stats.verify_ms * 1e6 - TOLERANCE_NS


@pytest.mark.parametrize("name", ["paceline.propose", "paceline.verify", "paceline.accept", "paceline.forward"])
def test_only_what_failed_is_marked_so(tree: Tree, name: str) -> None:
    assert {span.status for span in tree.spans if span.name == name} == {0}


def test_a_clients_trace_is_continued(traced: Traced) -> None:
    reply = traced.coordinator.generate(
        text="abc",
        gamma=1,
        max_tokens=3,
        metadata={"traceparent": f"00-{CLIENTS_TRACE}-{CLIENTS_SPAN}-01"},
        stop={"ignore_eos": True},
    )
    assert reply.result.trace_id == CLIENTS_TRACE
    tree = trace_of(traced, reply)
    assert tree.root.parent_id == CLIENTS_SPAN
    assert {span.service for span in tree.spans} == {COORDINATOR, DRAFT, TARGET}


def test_a_client_that_does_not_sample_is_heeded(traced: Traced) -> None:
    unsampled = "4bf92f3577b34da6a3ce929d0e0e4736"
    reply = traced.coordinator.generate(
        text="abc", gamma=1, max_tokens=3, metadata={"traceparent": f"00-{unsampled}-{CLIENTS_SPAN}-00"}
    )
    assert reply.result.trace_id == ""
    # What comes later has arrived at the collector, from all three processes, and this has not.
    trace_of(traced, traced.coordinator.generate(text="abc", gamma=1, max_tokens=3, stop={"ignore_eos": True}))
    assert traced.receiver.spans_of(unsampled) == []
