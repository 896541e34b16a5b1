"""The tables of the full comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.phases import PHASES
from bench.record import Record
from bench.report import Table, figure, interval, met, not_slower
from bench.summary import (
    alpha,
    chosen,
    decode_ms,
    median,
    names,
    own_ms,
    ratio,
    sums,
    total_ratio,
    whole_ms,
)

OURS, TARGET_ALONE = "paceline", "paceline, gamma 0"
GENERATE, ASSISTED, LOOKUP = "transformers", "transformers, assistant", "transformers, prompt lookup"
SYSTEMS = (OURS, TARGET_ALONE, GENERATE, ASSISTED, LOOKUP)
RATIOS = (
    *((OURS, than) for than in (TARGET_ALONE, GENERATE, ASSISTED, LOOKUP)),
    (TARGET_ALONE, GENERATE),
)
TARGETS = {
    ("greedy", OURS, TARGET_ALONE): 1.5,
    ("greedy", OURS, GENERATE): 2.5,
    ("greedy", OURS, ASSISTED): 1.5,
    ("temperature 1", OURS, TARGET_ALONE): 1.15,
}
OWN_COST_LIMIT_MS = 3.0


def tables(records: Sequence[Record]) -> list[Table]:
    """Return all of them."""
    return [_speeds(records), _ratios(records), _categories(records), _positions(records), _phases(records)]


def _modes(records: Sequence[Record]) -> list[str]:
    return names(each.place.mode for each in records)


def _cells(records: Sequence[Record]) -> Iterator[tuple[str, str, list[Record]]]:
    for mode in _modes(records):
        for system in SYSTEMS:
            if found := chosen(records, mode=mode, system=system):
                yield mode, system, found


def _speeds(records: Sequence[Record]) -> Table:
    answers = {(each.place): each.answer for each in chosen(records, system=GENERATE)}
    rows = []
    for mode, system, found in _cells(records):
        rounds = sums(found)
        equal = [answers[each.place] == each.answer for each in found if each.place in answers]
        idle = sum(each.idle_cpu_ms for each in found) / sum(each.wall_ms for each in found)
        rows.append(
            (
                *(mode, system, f"{1e3 / median(found, whole_ms):.1f}", f"{1e3 / median(found, decode_ms):.1f}"),
                f"{median(found, lambda each: each.first_token_ms):.0f}",
                figure(sum(each.tokens for each in found) / rounds.rounds if rounds else None, ".2f"),
                figure(alpha(rounds), ".2f"),
                f"{sum(equal) / len(equal):.0%}" if mode == "greedy" and equal and system != GENERATE else "",
                f"{idle:.1%}",
            )
        )
    headers = ("mode", "system", "tokens/s", "after the first", "first token ms", "tokens a round", "alpha")
    return Table(
        "Speed, medians over prompts of medians over repeats", (*headers, "equal answers", "idle CPU"), tuple(rows)
    )


def _ratios(records: Sequence[Record]) -> Table:
    rows = []
    for mode in _modes(records):
        for system, than in RATIOS:
            ours, theirs = (chosen(records, mode=mode, system=name) for name in (system, than))
            whole, decode = ratio(theirs, ours, whole_ms), ratio(theirs, ours, decode_ms)
            if whole is None or decode is None:
                continue
            target = TARGETS.get((mode, system, than))
            rows.append(
                (
                    *(mode, system, than, f"{whole.value:.2f}", interval(whole)),
                    f"{total_ratio(theirs, ours, whole_ms):.2f}",
                    *(f"{decode.value:.2f}", interval(decode)),
                    met(whole.value >= target, f"≥ {target:g}") if target else "",
                )
            )
    headers = ("mode", "system", "against", "times as fast", "95% interval", "of all time", "after the first")
    return Table("How many times as fast", (*headers, "95% interval", "target"), tuple(rows), labels=3)


def _categories(records: Sequence[Record]) -> Table:
    rows = []
    for mode in _modes(records):
        for category in names(each.place.category for each in records):
            here = chosen(records, mode=mode, category=category)
            of = {system: chosen(here, system=system) for system in SYSTEMS}
            times = ratio(of[TARGET_ALONE], of[OURS], whole_ms)
            if times is None:
                continue
            speeds = (f"{1e3 / median(of[name], whole_ms):.1f}" if of[name] else "" for name in SYSTEMS)
            kept = figure(alpha(sums(of[OURS])), ".2f")
            rows.append((mode, category, *speeds, kept, f"{times.value:.2f}", interval(times), not_slower(times)))
    headers = ("mode", "category", *SYSTEMS, "alpha", "to gamma 0", "95% interval", "target")
    return Table("Tokens a second by category", headers, tuple(rows))


def _positions(records: Sequence[Record]) -> Table:
    found = {mode: sums(chosen(records, mode=mode, system=OURS)) for mode in _modes(records)}
    longest = max((len(rounds.tested) for rounds in found.values() if rounds), default=0)
    rows = []
    for mode, rounds in found.items():
        if rounds is None:
            continue
        pairs = [*zip(rounds.accepted, rounds.tested, strict=True), *[(0, 0)] * (longest - len(rounds.tested))]
        rows.append((mode, "tested", *(f"{tested}" if tested else "" for _, tested in pairs)))
        rows.append((mode, "kept", *(f"{kept / tested:.0%}" if tested else "" for kept, tested in pairs)))
    headers = ("mode", "drafts", *(f"{i + 1}" for i in range(longest)))
    return Table("Drafts tested, and the share of them that is kept, by position in the round", headers, tuple(rows))


def _phases(records: Sequence[Record]) -> Table:
    rows = []
    for mode, system, found in _cells(records):
        rounds = sums(found)
        if rounds is None:
            continue
        own = own_ms(rounds)
        parts = (f"{rounds.ms[name] / rounds.rounds:.2f}" for name in PHASES)
        shares = (f"{part / rounds.rounds:.0%}" for part in (rounds.ran_ahead, rounds.degraded))
        target = met(own <= OWN_COST_LIMIT_MS, f"≤ {OWN_COST_LIMIT_MS:g}")
        rows.append((mode, system, f"{rounds.rounds}", *parts, f"{own:.2f}", *shares, target))
    headers = ("mode", "system", "rounds", *PHASES, "own cost", "ran ahead", "degraded", "own cost, target")
    return Table("A round in ms, means over rounds", headers, tuple(rows))
