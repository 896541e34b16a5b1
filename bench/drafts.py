"""What a draft is worth, by category of question: `python -m bench drafts --draft DIR`.

The target answers each question by itself, greedy and at temperature 1; then alpha is computed at each position of the
answers, for each step of a round, from both models' distributions. No service is started and nothing is timed, so it
may run beside other work.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench.machine import commit, versions
from bench.prompts import CATEGORIES, Prompt, in_turn, load_prompts
from bench.report import Table
from services.common.engine.default_model import ensure_default_model, paceline_home
from services.common.engine.draft_model import DraftModel
from services.common.engine.engine import Engine
from services.common.engine.model import LoadedModel, LoadOptions, load_model
from services.common.engine.options import EngineOptions
from services.distill.card import fingerprint, tokens_a_pass
from services.distill.chat import question
from services.distill.scoring import MODES, Answer, Worth, answers, worth

_RESULTS = Path(__file__).with_name("results")
Found = dict[str, dict[str, Worth]]


@click.command()
@click.option("--draft", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--target", default="default", show_default=True, help="Folder, hub id or GGUF file.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines as in Spec-Bench.  [default: the benchmark's own]",
)
@click.option("--per-category", type=click.IntRange(1), default=2, show_default=True, help="Questions at most.")
@click.option("--tokens", type=click.IntRange(8), default=64, show_default=True, help="Of an answer.")
@click.option("--steps", type=click.IntRange(1, 16), default=4, show_default=True, help="Of a round.")
@click.option("--top-k", "top_ks", type=click.IntRange(1), multiple=True, default=(64, 128, 256), show_default=True)
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: bench/results/<time>-drafts.json"
)
@click.option("--markdown", is_flag=True, help="Print the tables as GitHub shows them.")
def main(
    draft: Path,
    target: str,
    prompts_file: Path | None,
    per_category: int,
    tokens: int,
    steps: int,
    top_ks: tuple[int, ...],
    threads: int | None,
    seed: int,
    out: Path | None,
    markdown: bool,
) -> None:
    """Compute a draft's alpha by category and step, on answers that the target writes."""
    began = datetime.datetime.now(datetime.UTC)
    model = str(ensure_default_model(paceline_home(), click.echo)) if target == "default" else target
    options = LoadOptions(model, threads=threads)
    prompts = _chosen(load_prompts(prompts_file) if prompts_file else load_prompts(), per_category)
    loaded = load_model(options)
    questions = [question(loaded, prompt.text) for prompt in prompts]
    told = _answers(loaded, questions, tokens, seed)
    # The engine has made the model its own.
    loaded = load_model(options)
    model_of_draft = DraftModel.load(draft, loaded.model).to(loaded.device).eval()
    found = _worth(loaded, model_of_draft, prompts, told, steps, top_ks)
    about = {
        "started": f"{began:%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "versions": versions(),
        "target": loaded.model_id,
        "dtype": loaded.dtype,
        "draft": fingerprint(draft),
        "questions": len(prompts),
        "tokens": tokens,
        "seed": seed,
    }
    path = out or _RESULTS / f"{began:%Y-%m-%dT%H%M%SZ}-drafts.json"
    path.write_text(json.dumps({"about": about, "alphas": _json(found)}, indent=1) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    for table in tables(found, steps, top_ks):
        console.print(table.markdown() + "\n" if markdown else table.rich(), markup=False, soft_wrap=markdown)
    click.echo(f"Written to {path}", err=True)


def tables(found: Found, steps: int, top_ks: Sequence[int]) -> list[Table]:
    """Return a table for each way of sampling, and one of what truncation costs."""
    headers = ("category", *(f"step {step}" for step in range(1, steps + 1)), f"tokens a pass, gamma {steps}")
    made = []
    for mode, by_category in found.items():
        rows = tuple(
            (category, *(f"{alpha:.3f}" for alpha in each.alphas), f"{tokens_a_pass(each.alphas)[-1]:.2f}")
            for category, each in {**by_category, "all": _sum(by_category.values(), steps)}.items()
        )
        made.append(Table(f"alpha by step, {mode}", headers, rows, labels=1))
    total = _sum(found["temperature 1"].values(), steps)
    forms = {"all": total.alphas, **{str(top_k): total.alphas_at(top_k) for top_k in top_ks}}
    rows = tuple((form, *(f"{alpha:.3f}" for alpha in alphas)) for form, alphas in forms.items())
    return [
        *made,
        Table("alpha by tokens that q is cut to, temperature 1", ("q's tokens", *headers[1:-1]), rows, labels=1),
    ]


def _chosen(prompts: Sequence[Prompt], per_category: int) -> list[Prompt]:
    categories = [category for category in CATEGORIES if any(prompt.category == category for prompt in prompts)]
    ranks: dict[str, int] = {}
    chosen = []
    for prompt in in_turn(prompts, categories):
        ranks[prompt.category] = ranks.get(prompt.category, 0) + 1
        if ranks[prompt.category] <= per_category:
            chosen.append(prompt)
    return chosen


def _answers(
    loaded: LoadedModel, questions: Sequence[Sequence[int]], tokens: int, seed: int
) -> dict[str, list[Answer]]:
    async def ask() -> dict[str, list[Answer]]:
        engine = Engine(loaded, EngineOptions())
        try:
            told = {}
            with Progress(transient=True) as bars:
                task = bars.add_task("the target answers", total=len(MODES) * len(questions))
                for mode, params in MODES.items():
                    told[mode] = await answers(
                        engine,
                        questions,
                        params,
                        tokens=tokens,
                        ends=loaded.eos_token_ids,
                        seed=seed,
                        report=lambda: bars.advance(task),
                    )
            return told
        finally:
            await engine.close()

    return asyncio.run(ask())


def _worth(
    loaded: LoadedModel,
    draft: DraftModel,
    prompts: Sequence[Prompt],
    told: dict[str, list[Answer]],
    steps: int,
    top_ks: Sequence[int],
) -> Found:
    found: Found = {mode: {} for mode in told}
    with Progress(transient=True) as bars:
        task = bars.add_task("alpha", total=sum(len(each) for each in told.values()))
        for mode, each in told.items():
            for prompt, answer in zip(prompts, each, strict=True):
                greedy = MODES[mode].temperature == 0
                of = worth(loaded, draft, answer, greedy=greedy, steps=steps, top_ks=top_ks)
                found[mode].setdefault(prompt.category, _sum((), steps)).add(of)
                bars.advance(task)
    return found


def _sum(parts: Iterable[Worth], steps: int) -> Worth:
    total = Worth(np.zeros(steps), np.zeros(steps))
    for part in parts:
        total.add(part)
    return total


def _json(found: Found) -> dict[str, object]:
    return {
        mode: {
            category: {
                "positions": [int(count) for count in each.counts],
                "alphas": each.alphas,
                "truncated": {str(top_k): each.alphas_at(top_k) for top_k in each.truncated},
            }
            for category, each in by_category.items()
        }
        for mode, by_category in found.items()
    }
