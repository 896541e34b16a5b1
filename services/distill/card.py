"""The card of a draft: README.md beside the weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from services.common.engine.default_model import NAME
from services.common.engine.draft_model import WEIGHTS_FILE
from services.distill.corpus import Corpus
from services.distill.folder import Folder, Settings
from services.distill.training import Score

_CURVE = 12


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of the draft's weights."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens_a_pass(alphas: Sequence[float]) -> list[float]:
    """Return the expected tokens a target pass for gamma 1, 2, ...: 1 + a_1 + a_1 a_2 + ...

    Args:
        alphas: By step, each given that the steps before were kept.
    """
    expected: list[float] = []
    kept = 1.0
    for alpha in alphas:
        kept *= alpha
        expected.append((expected[-1] if expected else 1.0) + kept)
    return expected


def licence(model: Path | None, target: str) -> str:
    """Return the licence of a target as its files tell it.

    Args:
        model: Its folder, if it is one.
        target: Its name.
    """
    if model is not None and (model / "README.md").is_file():
        found = re.search(r"^license:\s*(\S+)", (model / "README.md").read_text(errors="replace"), re.MULTILINE)
        if found:
            return found.group(1)
    if model is not None and (model / "config.json").is_file():
        told = json.loads((model / "config.json").read_text()).get("license")
        if told:
            return str(told)
    if target == NAME:
        return "apache-2.0"
    return "not told by its files: look it up before you pass the draft on"


def write_card(
    folder: Folder, settings: Settings, corpus: Corpus, score: Score, covered: float, licence_text: str, updates: int
) -> None:
    """Write README.md: what the draft is, what it learnt from, what it is worth, how to serve it."""
    steps = range(1, len(score.alphas) + 1)
    head = "| | " + " | ".join(f"step {step}" for step in steps) + " |\n|---|" + "---:|" * len(steps)
    alphas = " | ".join(f"{alpha:.3f}" for alpha in score.alphas)
    agreements = " | ".join(f"{share:.3f}" for share in score.agreements)
    expected = " | ".join(f"{tokens:.2f}" for tokens in tokens_a_pass(score.alphas))
    spent = ", ".join(f"{phase} {seconds / 3600:.2f} h" for phase, seconds in settings.spent_s.items())
    sources = ", ".join(f"{source.name} ({source.texts} texts)" for source in corpus.sources)
    fed = "the target's hidden states" if settings.kind == "hidden" else "tokens alone"
    layers = ", ".join(map(str, settings.layers))
    size = (folder.out / WEIGHTS_FILE).stat().st_size / 1e6
    (folder.out / "README.md").write_text(
        f"""# Draft for {settings.target}

A draft for speculative decoding with Paceline: {len(settings.layers)} layer(s), fed with {fed}, started from the
target's layers {layers}, with a head over {settings.head} tokens. Embeddings and head are the target's and are read
from it. {size:.1f} MB, SHA-256 `{fingerprint(folder.out)}`.

| | |
|---|---|
| data | {corpus.count} tokens that the target wrote: {sources} |
| held out | {settings.held_out} texts, of which the head's tokens are {covered:.1%} |
| training | {updates} updates; {spent} |
| states of the target | after {", ".join(map(str, settings.feature_layers))} layers, in {settings.dtype} |
| licence of the target | {licence_text} |
| tokenizer fingerprint | `{settings.tokenizer_fingerprint}` |

On the held-out texts, at temperature 1, by step of a round. alpha is the mean of the sum of min(p, q): how often a
draft is kept. Agreement is how often the likeliest tokens are the same, which is alpha when greedy. Tokens a pass are
what a round is worth with so many drafts, if each step's alpha held whatever came before.

{head}
| alpha | {alphas} |
| agreement | {agreements} |
| tokens a pass | {expected} |

alpha against hours, all phases counted:

| hours | tokens learnt from | alpha, step 1 | last step | loss |
|---:|---:|---:|---:|---:|
{_curve(folder.log)}

Serve it with `paceline draft-worker --drafter model --model THIS_FOLDER` beside a target worker of {settings.target}.
"""
    )


def _curve(log: Path) -> str:
    """Return some of the log's lines as rows of a table, the first and the last among them."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if len(lines) > _CURVE:
        lines = [lines[round(i * (len(lines) - 1) / (_CURVE - 1))] for i in range(_CURVE)]
    return "\n".join(
        f"| {line['hours']:.2f} | {line['tokens']} | {line['alphas'][0]:.3f} | {line['alphas'][-1]:.3f} | "
        f"{'' if line['loss'] is None else format(line['loss'], '.3f')} |"
        for line in lines
    )
