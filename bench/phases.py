"""Where the time of a round goes, by the coordinator's clock and what the workers say of their passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.v1.coordinator_pb2 import RoundStats

PHASES = ("draft pass", "propose", "target pass", "verify", "accept", "rest", "between")
OWN = ("propose", "verify", "accept", "rest")
"""What a round costs the service besides the passes."""


def phases(rounds: Sequence[RoundStats]) -> Iterator[Mapping[str, float]]:
    """Yield the milliseconds of each round of an answer; those of a round add up to the start of the next.

    draft pass: waited for it. propose: waiting for drafts, less that: wire, worker. target pass. verify: waiting for
    rows, less that. accept: checking rows, and the rule. rest: of the coordinator. between: the chunk on its way to the
    client, 0 for the last round.
    """
    for i, each in enumerate(rounds):
        ended_ms = each.start_ms + each.total_ms
        # A draft that ran ahead was computed while something else was waited for.
        draft_pass = min(each.draft.forward_ms, each.draft_ms)
        target_pass = min(each.target.forward_ms, each.verify_ms)
        yield {
            "draft pass": draft_pass,
            "propose": each.draft_ms - draft_pass,
            "target pass": target_pass,
            "verify": each.verify_ms - target_pass,
            "accept": each.accept_ms,
            "rest": each.total_ms - each.draft_ms - each.verify_ms - each.accept_ms,
            "between": rounds[i + 1].start_ms - ended_ms if i + 1 < len(rounds) else 0.0,
        }
