"""The table that closes an answer."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from services.cli.client import Answer
from services.cli.output import STYLES, finish_reason, origin_name


def closing_table(answer: Answer) -> Table:
    """Return the figures of an answer, in all and as a mean over its rounds."""
    stats, usage = answer.result.speculation, answer.result.usage
    rounds = len(stats.per_round)
    table = Table(title=_title(answer), title_justify="left", title_style="bold", caption=_legend(answer))
    table.caption_justify = "left"
    for name, justify in (("", "left"), ("in all", "right"), ("a round", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    speed = usage.completion_tokens / answer.total_s if answer.total_s else 0.0
    table.add_row("tokens", f"{usage.completion_tokens}", f"{stats.tokens_per_round:.2f}", _prompt(answer))
    table.add_row("rounds", f"{stats.rounds}", "", f"{stats.degraded_rounds} degraded" if stats.degraded_rounds else "")
    table.add_row("accepted length", f"{stats.accepted}", f"{_mean(stats.accepted, rounds):.2f}", "drafts kept")
    table.add_row("alpha", f"{stats.alpha:.2f}", "", f"{stats.accepted} of {stats.tested} tested drafts kept")
    table.add_row("tokens/s", f"{speed:.1f}", "", f"{answer.total_s:.2f} s")
    table.add_row("first token", _ms(answer.first_token_s * 1000), "", "")
    table.add_section()
    for phase, remark in (("draft", ""), ("verify", ""), ("accept", ""), ("wire", "within draft and verify")):
        total_ms = sum(getattr(each, f"{phase}_ms") for each in stats.per_round)
        table.add_row(phase, _ms(total_ms), _ms(_mean(total_ms, rounds)), remark)
    return table


def _title(answer: Answer) -> str:
    result = answer.result
    gamma = f"up to {result.gamma}" if result.adaptive_gamma else result.gamma
    return f"ended by {finish_reason(result)} · seed {result.seed} · gamma {gamma}"


def _prompt(answer: Answer) -> str:
    return f"after {answer.result.usage.prompt_tokens} of prompt"


def _legend(answer: Answer) -> Text:
    counts = Counter(token.origin for token in answer.tokens)
    legend = Text(style="not dim not italic")
    for origin, style in STYLES.items():
        if counts[origin]:
            legend.append("■ ", style).append(f"{counts[origin]} {origin_name(origin).replace('_', ' ')}   ")
    return legend


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.1f} ms"
